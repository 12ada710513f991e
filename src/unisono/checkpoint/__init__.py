"""Checkpoints: sharded, asynchronous, atomic, checksummed, never pickled.

One directory per step, committed by its last file. ``folder`` has the names, ``manifest`` the format,
``host_snapshot`` the copy taken while training waits. Only ``CheckpointOptions`` imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
