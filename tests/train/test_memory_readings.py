"""The memory figures of a run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

# 300 MB of mapped samples, on a host that has as much memory as the run begins with and 200 MB more
MAPPED = """
import json
import sys
from pathlib import Path

import numpy as np
from torch import nn

from unisono import ObserveOptions, PlanOptions, Trainer, TrainOptions
from unisono.diagnose import diagnose, read_run
from unisono.observe.events import events_path, read_events
from unisono.observe.host_memory import PeakMemory
from unisono.train import loop_assembly

start = PeakMemory().read()
loop_assembly.host_memory_limit_bytes = lambda: start + 200_000_000
rows = np.load(sys.argv[1], mmap_mode="r")


class Rows:
    fingerprint = "rows"

    def __len__(self):
        return len(rows)

    def read(self, indices):
        inputs = np.stack([rows[index].mean(keepdims=True) for index in indices])
        return {"inputs": inputs, "targets": inputs}


run_dir = Path(sys.argv[2])
plan = PlanOptions(device="cpu", precision="fp32", global_batch=10)
Trainer(
    nn.Linear(1, 1), Rows(), plan, objective="mean_squared_error", run_dir=run_dir, options=TrainOptions(steps=10),
    observe=ObserveOptions(console="off", trackers=(), report=False),
).fit()
peaks = [event["mem/peak_bytes"] for event in read_events(events_path(run_dir, 0)).events if event["kind"] == "step"]
print(json.dumps([start, peaks, [finding.id for finding in diagnose(read_run(run_dir))]]))
"""


def test_pages_of_mapped_data_are_no_memory_in_use(tmp_path: Path) -> None:
    np.lib.format.open_memmap(tmp_path / "rows.npy", mode="w+", dtype=np.float32, shape=(100, 750_000))
    done = subprocess.run(
        [sys.executable, "-c", MAPPED, str(tmp_path / "rows.npy"), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    start, peaks, ids = json.loads(done.stdout.splitlines()[-1])
    assert peaks == sorted(peaks)
    assert peaks[-1] - start < 150_000_000
    assert "MEM01" not in ids
