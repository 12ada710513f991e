"""Readers and writers of the table formats, one module each; ``table_files`` chooses one by a file's name."""
