"""Checkpoints: sharded, asynchronous, atomic, checksummed, never pickled.

One directory per step, committed by its last file; see ``folder`` for the names, ``manifest`` for what it says about
itself, ``image`` for how the training is kept waiting so little. Options import no torch; the rest is loaded when first
asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy import lazily
from unisono.train.checkpoint.options import CheckpointOptions

if TYPE_CHECKING:
    from unisono.train.checkpoint.checkpointer import Checkpointer
    from unisono.train.checkpoint.conversion import convert
    from unisono.train.checkpoint.folder import Entry, list_checkpoints, set_aside_after
    from unisono.train.checkpoint.integrity import find_latest, verify
    from unisono.train.checkpoint.reader import Snapshot, TensorSpec, open_checkpoint

__all__ = [
    "CheckpointOptions",
    "Checkpointer",
    "Entry",
    "Snapshot",
    "TensorSpec",
    "convert",
    "find_latest",
    "list_checkpoints",
    "open_checkpoint",
    "set_aside_after",
    "verify",
]

_HOME = {
    "Checkpointer": "checkpointer",
    "Entry": "folder",
    "Snapshot": "reader",
    "TensorSpec": "reader",
    "convert": "conversion",
    "find_latest": "integrity",
    "list_checkpoints": "folder",
    "open_checkpoint": "reader",
    "set_aside_after": "folder",
    "verify": "integrity",
}

__getattr__, __dir__ = lazily(__name__, _HOME)
