"""What a run will do, decided before it starts and carried as data. Needs no process group and no accelerator."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
