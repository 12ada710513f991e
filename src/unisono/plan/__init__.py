"""The plan of a run: its options, its derivation and its validation. Needs no process group and no accelerator."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
