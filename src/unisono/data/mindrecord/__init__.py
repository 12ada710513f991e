"""MindRecord: MindSpore's data files, read and written."""

from unisono.data.mindrecord.header import FieldType
from unisono.data.mindrecord.reader import MindRecordFile
from unisono.data.mindrecord.writer import MindRecordWriter

__all__ = ["FieldType", "MindRecordFile", "MindRecordWriter"]
