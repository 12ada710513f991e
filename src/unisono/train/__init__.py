"""Training: the trainer, its options, metrics and objectives. Importing this package alone does not import torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
