"""Processes as one job: who am I (torch-free), who are the others, and how do we stop together.

``JobSpec``, ``job_from_environ``, ``StopNotice``, ``fault_point`` and ``record_failure`` import no torch; ``World``,
``join`` and ``agree`` do, when first asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
