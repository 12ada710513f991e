"""Starts processes on this host and answers for them. Imports no torch; ``launch`` itself is loaded when first asked for."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
