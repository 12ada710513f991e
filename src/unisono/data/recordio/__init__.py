"""RecordIO: Apache MXNet's ``.rec`` files, read, written, checked and mended."""

from unisono.data.recordio.framing import ImageHeader, pack_header, unpack_header
from unisono.data.recordio.reader import RecordDataset, RecordFile
from unisono.data.recordio.writer import RecordWriter

__all__ = ["ImageHeader", "RecordDataset", "RecordFile", "RecordWriter", "pack_header", "unpack_header"]
