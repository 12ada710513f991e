"""MindRecord: MindSpore's data files, read and written."""

from unisono.data.mindrecord.header import Field as Field
from unisono.data.mindrecord.reader import MindRecordFile as MindRecordFile
from unisono.data.mindrecord.writer import MindRecordWriter as MindRecordWriter
