"""Observing a run: events, timers and rates, console, trackers, report.

The per-rank JSONL files of ``events`` are the record of a run; everything else is computed from them. No torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
