"""What every test shares: warm worker processes, and guards against what a test leaves behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent / "support"))

from pool import nursery as nursery
from pool import pool as pool

pytest_plugins = ["budget"]

# No timed tests: how long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# Under nohup or & this process ignores these signals, and children would inherit that. What they inherit of a handler is the
# default action: here nothing happens still, and programs that tests start have signals as from a terminal.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)

if "PYTEST_XDIST_WORKER" in os.environ:
    # one thread for each of the processes that share the cores
    import torch

    torch.set_num_threads(1)

# set by pytest, or by torch's compiler when it is imported
TORCHS_OWN = {
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "COLUMNS",
    "KINETO_LOG_LEVEL",
    "LINES",
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
}


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Records of the user's own are those of the tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked ``gpu`` skip where there is no accelerator."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.accelerator.is_available():
            pytest.skip("no accelerator here")
        # a run on the CPU asks for it and leaves it on in this process; attention kernels of an accelerator then warn
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a changed environment, a process group or a thread."""
    before = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    changed -= TORCHS_OWN
    assert not changed, f"environment left changed: {sorted(changed)}"
    if "torch" in sys.modules:
        import torch.distributed as dist

        assert not (dist.is_available() and dist.is_initialized()), "a process group was left open"
    deadline = time.monotonic() + 2
    while (
        left := [t for t in threading.enumerate() if t not in threads and not t.daemon and not _compilers(t)]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"threads left running: {left}"


def _compilers(thread: threading.Thread) -> bool:
    """torch's compiler keeps its pool of compiling threads for the life of the process."""
    return "torch._inductor" in sys.modules and thread.name.startswith("ThreadPoolExecutor")
