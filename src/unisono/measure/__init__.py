"""Peak rates of devices, speeds of links and storage, and FLOPs of models. Importing this package alone imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
