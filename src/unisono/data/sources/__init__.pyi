from .open_source import open_source as open_source
from .open_source import source_files as source_files
from .open_source import source_groups as source_groups
from .open_source import source_paths as source_paths
