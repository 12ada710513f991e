"""Diagnosis of a run from its events and profiles, or of a trace. Imports no torch.

Findings name a cause, its cost and the setting to change.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
