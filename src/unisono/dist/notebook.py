"""Whether this process is the kernel of a notebook, and of which one."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def notebook_name() -> str | None:
    """File name without suffix of this kernel's notebook, as Jupyter Server or VS Code tells it; None if neither does."""
    program = vars(sys.modules["__main__"])
    told = (program.get("__vsc_ipynb_file__"), os.environ.get("JPY_SESSION_NAME"))
    paths = [Path(name) for name in told if isinstance(name, str) and name.endswith(".ipynb")]
    return paths[0].stem if paths else None
