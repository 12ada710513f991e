"""Tables of rows in many file formats: read, write, convert. ``convert.pack`` packs inputs into record files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
