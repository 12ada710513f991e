"""Observation of a run: events, meters, console and trackers.

The events file of each rank is the record of a run; console, trackers and report are views of it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
