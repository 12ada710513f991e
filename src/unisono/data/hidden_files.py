"""Hidden files and folders, whose names begin with a dot: folders of data are read without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unisono.sanitize import listed

_OF_TOOLS: Final = frozenset({".DS_Store", ".directory", ".git", ".gitattributes", ".gitignore", ".ipynb_checkpoints"})
_SHOWN_CHARS: Final = 100


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden, by its name without the folders before it."""
    return name.startswith(".")


def may_be_data(name: str) -> bool:
    """Whether a file or folder is hidden, and not one that systems and tools make by themselves, so a warning counts it."""
    return is_hidden(name) and name not in _OF_TOOLS and not name.startswith("._")  # macOS' attributes of a file


def hidden_notice(paths: Sequence[str]) -> str:
    """How many hidden files and folders were left out, and some of them."""
    return f"{len(paths)} hidden file(s) or folder(s), which are left out: {listed(paths, _SHOWN_CHARS)}"
