"""A parameter server of another release: its frames have the next version."""

from __future__ import annotations

from unisono.kvstore.server.__main__ import main
from unisono.kvstore.wire import frame


def serve() -> int:
    frame.VERSION += 1
    return main()
