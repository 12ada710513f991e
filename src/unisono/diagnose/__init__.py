"""Diagnosis of a run from its events and profiles, or of a trace: findings that name a cause, its cost and the setting to change. Imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
