"""RecordIO: Apache MXNet's ``.rec`` files, read, written, checked and mended."""

from unisono.data.recordio.framing import ImageHeader as ImageHeader
from unisono.data.recordio.framing import pack_header as pack_header
from unisono.data.recordio.framing import unpack_header as unpack_header
from unisono.data.recordio.reader import RecordDataset as RecordDataset
from unisono.data.recordio.reader import RecordFile as RecordFile
from unisono.data.recordio.writer import RecordWriter as RecordWriter
