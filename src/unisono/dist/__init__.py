"""The processes of a job: this process's place in it, its peers, collectives, stop signals and failure records.

Only ``World``, ``join_world`` and ``agree`` import torch, when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
