"""Conversion between file formats, and packing of files into records."""
