"""Durable files and directories: complete or absent, also after a crash. No torch, no network."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
