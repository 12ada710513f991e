"""unisono: train PyTorch models on the hardware you have.

The names below are the public surface. They are imported when first used, so ``import unisono`` does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
