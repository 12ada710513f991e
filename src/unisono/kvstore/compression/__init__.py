"""Gradient compression with error feedback: codecs by name, residuals, and the compressed sum over a process group.

``contract_violations`` and ``check_length`` are for authors of codecs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
