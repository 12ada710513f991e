"""Checkpoints: sharded, asynchronous, atomic, checksummed, never pickled.

One directory per step, committed by its last file; see ``folder`` for the names, ``manifest`` for what it says about
itself, ``image`` for how the training is kept waiting so little. Options import no torch; the rest is loaded when first
asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
