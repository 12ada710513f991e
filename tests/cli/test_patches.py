"""The settings of a diagnosis remove the finding that they are for: ``diagnose --apply`` on injected faults, then ``train``.

``DATA01`` is in ``test_diagnose``; ``PP01`` and ``MEM04`` are in ``tests/diagnose``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import Desk, Outcome, events_of

from unisono.checkpoint.writer import SaveWriter
from unisono.train.run_checkpoints import RunCheckpoints

pytestmark = pytest.mark.full

ROWS = """
import time

import numpy as np
import torch

from unisono import Components, RunConfig
from unisono.train import Every


class Rows:
    def __init__(self, sign=1.0, outliers=()):
        self.sign, self.outliers = sign, outliers

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        target = 100.0 if index in self.outliers else self.sign
        return np.ones(8, np.float32), np.full(1, target, np.float32)


def config(model=lambda run: torch.nn.Linear(8, 1), data=lambda run: (Rows(), Rows()), callbacks=lambda run: []):
    return RunConfig(
        components=Components(model=model, data=data, callbacks=callbacks, objective="mean_squared_error")
    )
"""

GARBAGE = """
from functools import partial

heap = [[] for _ in range(10**6)]  # what each full collection walks through
newest = []  # each object is kept for five steps, so Python decides to collect


def make_garbage(step, model):
    newest.extend([] for _ in range(50_000))
    del newest[:-250_000]


config = partial(config, callbacks=lambda run: [Every(steps=1, call=make_garbage)])
"""

PAUSE = """
from functools import partial


def pause(step, model):
    time.sleep(0.06)


config = partial(config, callbacks=lambda run: [Every(steps=1, call=pause)])
"""

# on the thread that saves
SLOW_SAVE = """
from unisono.checkpoint.writer import SaveWriter

prepare = SaveWriter._prepare


def slowly(writer, save):
    time.sleep(1.0)
    return prepare(writer, save)


SaveWriter._prepare = slowly
"""

OUTLIER = """
from functools import partial

from unisono.data.order.permutation import Permutation

# samples of steps 61, 81 and 101
outliers = set(Permutation(2000, seed=0)(np.array([4 * 60, 4 * 80, 4 * 100])).tolist())
config = partial(config, data=lambda run: (Rows(outliers=outliers), Rows()))
"""

# the mean of the held-out targets is another
OVERFIT = """
from functools import partial

config = partial(config, data=lambda run: (Rows(sign=1.0), Rows(sign=-1.0)))
"""

# operators of 64 KiB for each sample: a few microseconds, and a hundred for 16 of them
SMALL = """
from functools import partial


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, inputs):
        rows = inputs[:, :1].repeat(1, 4096)
        for _ in range(50):
            rows = torch.exp(-rows)
        return rows[:, :1] * self.weight.sum()


config = partial(config, model=lambda run: Small())
"""

RUN = {"plan.device": "cpu", "plan.precision": "fp32", "plan.global_batch": 4, "loader.num_workers": 0}
RUN |= {"train.eval_every_steps": 0, "checkpoint.every_steps": 0, "observe.console": "off"}


def diagnosed(desk: Desk, run_dir: Path, *more: str) -> dict[str, Any]:
    done = desk.here("diagnose", str(run_dir), "--json", *more)
    assert done.code == 0, done.err
    return done.json


def before_and_after(
    train: Callable[..., Outcome], desk: Desk, folder: Path, code: str, **settings: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The finding ``code`` of a run, the settings that are written for it, and the findings of a run with these and with those of
    ``after``."""
    changes = settings.pop("after", {})
    run_dir, overlay = folder / "run", folder / "better.toml"
    files = [str(folder / "own.py")] if (folder / "own.py").exists() else []
    chosen = {"run.dir": run_dir, **settings}
    done = train("train", *files, *(f"--set={name}={value}" for name, value in chosen.items()))
    assert done.code == 0, done.err
    told = diagnosed(desk, run_dir, "--apply", str(overlay))
    findings = {finding["id"]: finding for finding in told["findings"]}
    assert code in findings, told["findings"]
    assert findings[code]["patch"].items() <= told["patch"].items()
    changes = changes(told["patch"]) if callable(changes) else changes
    done = train("train", str(overlay), *(f"--set={name}={value}" for name, value in changes.items()))
    assert done.code == 0, done.err
    after = {finding["id"]: finding for finding in diagnosed(desk, folder / "run-2")["findings"]}
    return findings[code], told["patch"], after


@pytest.mark.parametrize(
    ("code", "own", "settings", "patch"),
    [
        # two collections after the first steps
        ("GC01", GARBAGE, {"train.steps": 40, "after": {"train.steps": 250}}, {"train.gc_every_steps": 100}),
        ("NUM02", OUTLIER, {"train.steps": 120, "optim.lr": 0.01}, {"train.spike_sigmas": 8.0}),
        (
            "NUM05",
            OVERFIT,
            {"train.steps": 200, "train.eval_every_steps": 20, "train.num_eval_samples": 8, "optim.lr": 0.002},
            {"train.early_stop_patience": 3},
        ),
        (
            "LAUNCH01",
            SMALL,
            {"train.steps": 10, "plan.global_batch": 32, "plan.micro_batch": 1, "observe.profile_steps": "5:8"},
            None,
        ),
    ],
)
def test_settings_remove_the_finding(
    desk: Desk, tmp_path: Path, code: str, own: str, settings: dict[str, Any], patch: dict[str, Any] | None
) -> None:
    (tmp_path / "own.py").write_text(ROWS + own)
    before, _, after = before_and_after(desk.here, desk, tmp_path, code, **RUN | settings)
    assert patch is None or before["patch"] == patch
    assert code not in after, after[code]


def test_saves_in_the_background_remove_the_stall(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(ROWS + PAUSE.replace("0.06", "0.12") + SLOW_SAVE)
    monkeypatch.setattr(SaveWriter, "_prepare", SaveWriter._prepare)  # pyright: ignore[reportPrivateUsage]
    settings = {"train.steps": 57, "checkpoint.every_steps": 24, "checkpoint.asynchronous": "false"}
    before, _, after = before_and_after(desk.here, desk, tmp_path, "CKPT01", **RUN | settings)
    assert before["cost_frac"] > 0.15
    assert before["patch"] == {"checkpoint.asynchronous": True}
    assert "CKPT01" not in after, after["CKPT01"]


# on the thread that trains, as the copy of a large state takes
SLOW_COPY = """
from unisono.train.run_checkpoints import RunCheckpoints

save = RunCheckpoints.save


def slowly(checkpoints, **options):
    time.sleep(0.04)
    return save(checkpoints, **options)


RunCheckpoints.save = slowly
"""


def test_fewer_saves_remove_the_stall(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(ROWS + PAUSE + SLOW_COPY)
    monkeypatch.setattr(RunCheckpoints, "save", RunCheckpoints.save)
    settings: dict[str, Any] = {"train.steps": 40, "checkpoint.every_steps": 4}
    settings["after"] = lambda patch: {"train.steps": int(2.5 * patch["checkpoint.every_steps"])}  # two saves
    before, _, after = before_and_after(desk.here, desk, tmp_path, "CKPT01", **RUN | settings)
    assert before["cost_frac"] > 0.1
    saves = [event for event in events_of(tmp_path / "run-2") if event["kind"] == "checkpoint_saved"]
    assert len(saves) >= 2
    assert "CKPT01" not in after, after["CKPT01"]


# on a host that has as much memory as the run begins with and 500 MB more
HUNGRY = """
from functools import partial

from unisono.observe.host_memory import PeakMemory
from unisono.train import loop_assembly

limit = PeakMemory().read() + 500_000_000
loop_assembly.host_memory_limit_bytes = lambda: limit


class Hungry(torch.nn.Linear):
    def forward(self, inputs):
        # 120 MB for each sample, in as many tensors as a model of some layers has: with the launcher's settings of malloc the
        # space of a single huge tensor is lost to the next one as soon as a small one has taken its beginning
        held = [torch.ones(len(inputs), 1_000_000) for _ in range(30)]
        return super().forward(inputs) + sum(0 * each[:, :1] for each in held)


config = partial(config, model=lambda run: Hungry(8, 1))
"""


def test_smaller_micro_batches_need_less_memory(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ROWS + HUNGRY)
    settings = RUN | {"train.steps": 6, "plan.micro_batch": 4}
    before, _, after = before_and_after(desk.process, desk, tmp_path, "MEM01", **settings)
    assert before["patch"] == {"plan.micro_batch": 2}
    assert "MEM01" not in after, after["MEM01"]


def test_kept_activations_remove_recompute(desk: Desk, tmp_path: Path) -> None:
    settings = dict(pair.removeprefix("--set=").split("=", 1) for pair in desk.settings)
    settings |= {"train.steps": 10, "train.eval_every_steps": 0, "model.num_layers": 2, "model.dim": 256}
    settings |= {"plan.recompute": "full", "observe.profile_steps": "5:8", "loader.num_workers": 0}
    before, _, after = before_and_after(desk.here, desk, tmp_path, "RECOMP01", **settings)
    assert before["patch"] == {"plan.recompute": "none"}
    assert "RECOMP01" not in after


# so much work in the product with the vocabulary that no device is bound by the calls of its other operators
WIDE = {
    "model.dim": 1024,
    "model.num_heads": 16,
    "model.num_kv_heads": 16,
    "data.seq_len": 256,
    "plan.global_batch": 32,
}


@pytest.mark.gpu
def test_a_padded_vocabulary(desk: Desk, tmp_path: Path) -> None:
    for number in range(60):  # samples for a batch, and some to hold out
        (desk.folder / f"corpus/more{number}.py").write_text(f"x = {number}\n" * 100)
    settings: dict[str, Any] = dict(pair.removeprefix("--set=").split("=", 1) for pair in desk.settings)
    settings |= WIDE | {"train.steps": 10, "train.eval_every_steps": 0, "model.vocab_size": 50_257}
    settings |= {"plan.device": "auto", "observe.profile_steps": "5:8", "loader.num_workers": 0}
    before, _, after = before_and_after(desk.process, desk, tmp_path, "UTIL02", **settings)
    assert before["patch"] == {"model.vocab_size": 50_304}
    assert "UTIL02" not in after


# in a parameter server each byte takes its time, and one request waits for the other
SLOW_SERVER = """
import sys
import threading
import time

if "unisono.kvstore.server" in sys.orig_argv:
    from unisono.kvstore.server.parameter_server import ParameterServer
    from unisono.kvstore.wire.frame import payload_views

    exchange, lock = ParameterServer._exchange, threading.Lock()

    def slowly(self, run, peer, frame):
        with lock:
            time.sleep(sum(part.nbytes for part in payload_views(frame)) * SECONDS)
        return exchange(self, run, peer, frame)

    ParameterServer._exchange = slowly
"""
# 46 kB in keys of like size
DEEP = """
from functools import partial

layers = [torch.nn.Linear(8, 32), *(torch.nn.Linear(32, 32) for _ in range(10)), torch.nn.Linear(32, 1)]
config = partial(config, model=lambda run: torch.nn.Sequential(*layers))
"""
SERVERS = {"plan.sync": "dist_async", "launch.num_processes": 2, "launch.num_threads": 1, "launch.num_servers": 1}


def test_more_servers_remove_the_wait_for_one(desk: Desk, tmp_path: Path) -> None:
    """A step of a worker takes 80 ms and the gradients that it sends 100 ms of one server, or 50 ms of each of two: two workers
    keep one server busy all the time, and two servers less than 80 % of it."""
    (tmp_path / "own.py").write_text(ROWS + DEEP + PAUSE.replace("0.06", "0.08"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SLOW_SERVER.replace("SECONDS", "0.1 / 46_212"))
    train = partial(desk.process, PYTHONPATH=str(tmp_path / "site"))
    before, _, after = before_and_after(train, desk, tmp_path, "SRV01", **RUN | SERVERS | {"train.steps": 60})
    assert before["patch"] == {"launch.num_servers": 2}
    assert "SRV01" not in after, after["SRV01"]


# Worker 1 pushes gradients of noise; worker 0 pulls the weight back to 0 at once, as far as it has not moved meanwhile. In each
# period (a links event has 100 steps of a worker) worker 0 waits for another number of these pushes, whatever the host is busy
# with. A bound makes worker 1 wait as well: then worker 0 goes on after 0.03 s.
STALE = """
import os
from functools import partial
from pathlib import Path

pushes = Path("FOLDER/pushes")
calls = 0


class Weight(torch.nn.Linear):
    def __init__(self, run):
        super().__init__(1, 1, bias=False)
        self.longest_wait_s = 10 if run.plan.staleness == "none" else 0.03

    def forward(self, inputs):
        global calls
        if not self.training:
            return super().forward(inputs)
        if os.environ.get("UNISONO_RANK") != "0":
            with pushes.open("ab") as file:
                file.write(b".")
            time.sleep(0.002)
            return super().forward(inputs) + torch.randn(1)
        begin_s, begin = time.monotonic(), pushes.stat().st_size
        awaited = begin + (0, 12, 3)[calls // 100 % 3]
        while pushes.stat().st_size < awaited and time.monotonic() - begin_s < self.longest_wait_s:
            time.sleep(0.001)
        calls += 1
        return 10**0.5 * super().forward(inputs)


class Ones(Rows):
    def __getitem__(self, index):
        return np.ones(1, np.float32), np.zeros(1, np.float32)


config = partial(config, model=Weight, data=lambda run: (Ones(), Ones()))
"""


@pytest.mark.timeout(400)
def test_a_bound_removes_the_noise_of_stale_gradients(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ROWS + STALE.replace("FOLDER", str(tmp_path)))
    (tmp_path / "pushes").touch()
    settings = RUN | SERVERS | {"train.steps": 4000, "plan.staleness": "none", "optim.kind": "sgd", "optim.lr": 0.05}
    # such losses are squares of small numbers, which spike without a fault
    settings |= {
        "optim.momentum": 0.0,
        "schedule.kind": "constant",
        "after": {"train.spike_sigmas": 0, "train.steps": 900},
    }
    before, _, after = before_and_after(desk.process, desk, tmp_path, "STALE01", **settings)
    assert before["patch"] == {"plan.staleness": 0}
    assert "STALE01" not in after, after["STALE01"]


def test_a_server_that_workers_wait_for(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ROWS + DEEP)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SLOW_SERVER.replace("SECONDS", "3e-6"))
    settings = RUN | SERVERS | {"run.dir": tmp_path / "run", "train.steps": 60}
    changes = [f"--set={name}={value}" for name, value in settings.items()]
    done = desk.process("train", str(tmp_path / "own.py"), *changes, PYTHONPATH=str(tmp_path / "site"))
    assert done.code == 0, done.err
    (finding,) = (each for each in diagnosed(desk, tmp_path / "run")["findings"] if each["id"] == "SRV01")
    assert finding["cost_frac"] > 0.3
    assert finding["patch"] == {"launch.num_servers": 2}
    assert "it waits for its network" in finding["evidence"][1]


# two ranks enter a collective, which the other skips
SKIPPED = """
import os
from functools import partial

import torch.distributed as dist


def sum_of_two(step, model):
    if os.environ.get("UNISONO_RANK") != "1" and step.index == 5:
        dist.all_reduce(torch.ones(4))


config = partial(config, callbacks=lambda run: [Every(steps=1, call=sum_of_two)])
"""


def test_a_rank_that_skips_a_collective(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ROWS + SKIPPED)
    settings = RUN | {"run.dir": tmp_path / "run", "train.steps": 30}
    settings |= {"launch.num_processes": 3, "plan.global_batch": 6, "launch.timeout_s": 10, "launch.max_restarts": 0}
    done = desk.process(
        "train", str(tmp_path / "own.py"), *(f"--set={name}={value}" for name, value in settings.items())
    )
    assert done.code == 1, done.err
    first, *_ = diagnosed(desk, tmp_path / "run")["findings"]
    assert (first["id"], first["ranks"]) == ("HANG02", [1]), first
