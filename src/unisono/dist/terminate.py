"""Writes the last collectives of this rank when C++ code ends the process by an exception that nobody catches.

Gloo does so on a thread of its own when a peer sends more than this rank expects, because the two issued different collectives
(torch 2.13). Nothing of Python would run afterwards. The C++ library calls a handler first, in the thread that raised; the one
below writes the dump and goes on to the handler before it, which aborts.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from typing import Any, Final

_HANDLER: Final = ctypes.CFUNCTYPE(None)
_SET_TERMINATE: Final = "_ZSt13set_terminatePFvvE"  # std::set_terminate(void (*)()), in every libstdc++ and libc++

_handler: Any = None  # C++ holds its address
_before: int | None = None


def call_before_abort(function: Callable[[], None]) -> None:
    """Call ``function`` before an abort by C++, once; instead of one that was given before. No effect without a C++ library."""
    global _handler, _before
    set_terminate = _set_terminate()
    if set_terminate is None:
        return

    def handle() -> None:
        restore()
        try:
            function()
        finally:
            if before is not None:
                _HANDLER(before)()

    if _before is not None:
        restore()
    _handler = _HANDLER(handle)
    before = _before = set_terminate(ctypes.cast(_handler, ctypes.c_void_p))


@atexit.register
def restore() -> None:
    """Put the handler before back: in an interpreter that shuts down a thread of C++ cannot call Python."""
    global _before
    set_terminate = _set_terminate()
    if set_terminate is not None and _before is not None:
        set_terminate(ctypes.c_void_p(_before))
        _before = None


def _set_terminate() -> Any:
    for library in (None, "libstdc++.so.6", "libc++abi.dylib"):
        try:
            function = getattr(ctypes.CDLL(library), _SET_TERMINATE)
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
        return function
    return None
