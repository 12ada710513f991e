from .open_source import open_source as open_source
