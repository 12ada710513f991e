"""Failures of our own making, each with its cause and the rank that failed first. Scripts follow ``launching.PRELUDE``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failing:
    """What ``rank`` does of ``ranks``, and the label: its cause, and the ranks that the cause is to name."""

    name: str
    rank: int
    cause: str
    script: str
    ranks: int = 2
    named: tuple[int, ...] = ()

    @property
    def label(self) -> tuple[str, tuple[int, ...]]:
        return self.cause, self.named or (self.rank,)

    def text(self) -> str:
        return self.script.replace("RANK", str(self.rank))


# the peers wait, and are ended by the launcher
ALONE = """
import errno, mmap, ctypes, resource
if job.rank == RANK:
    {}
time.sleep(600)
"""

# the peers are in collectives with the one that fails
TOGETHER = """
import ctypes, threading
import torch
import torch.distributed as dist
from unisono.dist import join_world
torch.set_num_threads(1)
world = join_world(job, device_type="cpu", timeout_s=5)
data = torch.ones(1000)
for _ in range(3):
    world.all_reduce(data)
is_odd = job.rank == RANK
{}
for _ in range(3):
    world.all_reduce(torch.ones(1000))
    world.all_reduce(torch.ones(50))
world.close()
"""


def _alone(name: str, cause: str, statement: str, *ranks: int) -> list[Failing]:
    script = ALONE.format(statement.replace("\n", "\n    "))
    return [Failing(f"{name}-{rank}", rank, cause, script) for rank in ranks]


def _together(
    name: str, cause: str, statement: str, *ranks: int, named: tuple[int, ...] = (), size: int = 3
) -> list[Failing]:
    script = TOGETHER.format(statement)
    return [Failing(f"{name}-{rank}", rank, cause, script, size, named) for rank in ranks]


def _kill(name: str) -> str:
    return f"os.kill(os.getpid(), signal.{name})"


FULL_FILE = """
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
(run_dir / "large").write_bytes(bytes(9000))
"""
LITTLE_ADDRESS_SPACE = """
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
kept = [bytearray(64 << 20) for _ in range(100)]
"""
WRAPPED = """
try:
    open("/dev/full", "wb", buffering=0).write(b"x")
except OSError as error:
    raise {} from error
"""

FAILURES: list[Failing] = [
    # ended by a signal from outside
    *_alone("kill", "killed", _kill("SIGKILL"), 0, 1),
    *_alone("term", "killed", _kill("SIGTERM"), 0, 1),
    *_alone("hup", "killed", _kill("SIGHUP"), 1),
    *_alone("cpu-limit", "killed", _kill("SIGXCPU"), 1),
    *_alone("alarm", "killed", _kill("SIGALRM"), 0),
    *_alone("interrupt", "killed", _kill("SIGINT"), 1),
    *_alone("killed-in-a-shell", "killed", "os._exit(137)", 1),
    # native code
    *_alone("null-pointer", "crash", "ctypes.string_at(0)", 0, 1),
    *_alone("abort", "crash", "os.abort()", 0, 1),
    *_alone("bus", "crash", _kill("SIGBUS"), 1),
    *_alone("fpe", "crash", _kill("SIGFPE"), 1),
    *_alone("ill", "crash", _kill("SIGILL"), 0),
    *_alone("crash-in-a-shell", "crash", "os._exit(139)", 0),
    # memory
    *_alone("bytes", "out_of_memory", "bytearray(1 << 60)", 0, 1),
    *_alone("address-space", "out_of_memory", LITTLE_ADDRESS_SPACE, 1),
    *_alone("array", "out_of_memory", "import numpy\nnumpy.ones(1 << 50)", 1),
    *_alone("mapping", "out_of_memory", "mmap.mmap(-1, 1 << 46)", 0),
    *_alone("tensor", "out_of_memory", "import torch\ntorch.ones(1 << 50)", 1),
    # disk
    *_alone("full-disk", "disk_full", 'open("/dev/full", "wb", buffering=0).write(b"x")', 0, 1),
    *_alone("full-disk-at-close", "disk_full", 'file = open("/dev/full", "wb")\nfile.write(b"x")\nfile.close()', 1),
    *_alone("file-limit", "disk_full", FULL_FILE, 0, 1),
    *_alone("quota", "disk_full", 'raise OSError(errno.EDQUOT, "Disk quota exceeded")', 1),
    *_alone("wrapped", "disk_full", WRAPPED.format('RuntimeError("cannot save")'), 0),
    *_alone(
        "checkpoint",
        "disk_full",
        "from unisono.errors import CheckpointError\n"
        + WRAPPED.format('CheckpointError(given="g", rule="r", consequence="c", nearest="n")'),
        1,
    ),
    # the program
    *_alone("name", "program", "no_such_name", 0, 1),
    *_alone("type", "program", "len(3)", 0),
    *_alone("key", "program", "{}['a']", 1),
    *_alone("zero", "program", "1 / 0", 0),
    *_alone("assert", "program", "assert False", 1),
    *_alone("index", "program", "[][0]", 0),
    *_alone("import", "program", "import no_such_module", 1),
    *_alone("attribute", "program", "None.shape", 0),
    *_alone("value", "program", "int('x')", 1),
    *_alone("recursion", "program", "f = lambda: f()\nf()", 0),
    *_alone("syntax", "program", "exec('a b')", 1),
    *_alone("exit", "exit", "sys.exit(1)", 1),
    *_alone("hard-exit", "exit", "os._exit(3)", 0),
    # data, settings, numbers, files
    *_alone(
        "data",
        "bad_data",
        "from unisono.errors import DataError\nraise DataError(given='g', rule='r', consequence='c', nearest='n')",
        *(0, 1),
    ),
    *_alone(
        "setting",
        "configuration",
        "from unisono.errors import ConfigError\nraise ConfigError(given='g', rule='r', consequence='c', nearest='n')",
        1,
    ),
    *_alone("user-error", "configuration", "sys.exit(2)", 1),
    *_alone(
        "numerics",
        "numerics",
        "from unisono.errors import NumericsError\nraise NumericsError(given='g', rule='r', consequence='c', nearest='n')",
        0,
    ),
    *_alone("no-file", "io", "open('/no/such/file')", 1),
    *_alone("reset", "io", "raise ConnectionResetError('by peer')", 0),
    # hangs
    *_together("sleep", "hang", "if is_odd: time.sleep(600)", 0, 1, 2),
    *_together("holds-the-interpreter", "hang", "if is_odd: ctypes.PyDLL(None).sleep(600)", 1),
    *_together("lock", "hang", "lock = threading.Lock(); lock.acquire(); is_odd and lock.acquire()", 2),
    *_together("stopped", "hang", "if is_odd: os.kill(os.getpid(), signal.SIGSTOP)", 1),
    *_together("leaves", "peer_left", "if is_odd: os._exit(0)", 1),
    # collectives
    *_together("skips", "collective_mismatch", "is_odd or world.all_reduce(torch.ones(77))", 1, 2),
    *_together("count", "collective_mismatch", "world.all_reduce(torch.ones(1200 if is_odd else 1000))", 1, 2),
    *_together(
        "dtype",
        "collective_mismatch",
        "world.all_reduce(torch.ones(1000, dtype=torch.float64 if is_odd else torch.float32))",
        *(1, 2),
    ),
    # of two roots the third rank is served by one, and goes on: which of them is wrong nobody knows
    *_together("root", "collective_mismatch", "world.broadcast(data, src=1 if is_odd else 0)", 1, named=(0, 1)),
    *_together(
        "kind",
        "collective_mismatch",
        "world.broadcast(data, src=0) if is_odd else world.all_reduce(data)",
        *(1, 2),
    ),
]
