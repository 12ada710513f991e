"""Makes ``example.py`` importable as ``config_example``, for the tests and for the Python files they write."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("config_example", Path(__file__).with_name("example.py"))
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
