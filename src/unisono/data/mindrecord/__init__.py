"""MindRecord: MindSpore's data files, read and written."""

from unisono.data.mindrecord.header import FieldType as FieldType
from unisono.data.mindrecord.reader import MindRecordFile as MindRecordFile
from unisono.data.mindrecord.writer import MindRecordWriter as MindRecordWriter
