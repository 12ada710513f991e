"""Data sets, sample order and batches. Names are imported on first use, so options need no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
