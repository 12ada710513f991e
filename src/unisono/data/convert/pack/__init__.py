"""Pack images, text, tables and results of functions into record files, in parallel and resumable to the same bytes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
