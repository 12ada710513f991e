"""Peak rates of devices, and the FLOPs of a model. Only the functions that measure import torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
