"""Short profiles of a run: recorded on each rank, summarised there, merged over ranks. Importing it imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
