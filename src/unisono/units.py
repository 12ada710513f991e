"""Units of numbers. Imports nothing."""

from typing import Final

GIB: Final = 2**30  # bytes
