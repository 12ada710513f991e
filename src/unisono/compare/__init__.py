"""Runs side by side, from their events: speed, memory, losses, settings. Imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
