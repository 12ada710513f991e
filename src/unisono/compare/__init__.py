"""Runs side by side, from their events: speed, memory, losses, settings, without torch; and where they diverge first."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
