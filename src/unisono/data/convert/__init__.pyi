from .formats.table import Row as Row
from .formats.table import Table as Table
from .table_files import convert as convert
from .table_files import open_table as open_table
from .table_files import read_formats as read_formats
from .table_files import write_table as write_table
