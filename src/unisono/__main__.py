"""``python -m unisono``."""

from unisono.cli.main import entry

entry()
