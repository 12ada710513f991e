"""The key-value store keeps workers in step: it sums gradients, or holds and updates parameters.

``create_kvstore(kind, world)`` makes a store. ``server`` is the parameter server's process and ``wire`` its protocol;
a worker needs only ``ServerConfig``. Codecs are in ``compression``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
