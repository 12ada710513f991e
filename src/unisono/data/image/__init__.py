"""Images: decode only what a crop needs, and augment it with randomness keyed by sample. Names are loaded on first use."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
