"""Images, text, tables and what functions make, packed into record files: in parallel, to the same bytes however often cut short.

Names are loaded on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
