"""Examination of a host before a run: each check names what it saw and the cure."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
