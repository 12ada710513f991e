"""The typed run configuration, independent of the option classes.

Declare with ``option``, read with ``load_config``, and look at the outcome with ``render_origins``, ``diff``, ``explain``,
``schema`` and ``starter``. Every ``options`` module imports this package for ``option``; the rest loads on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
