"""The programs of ``examples/ported``: how each is run, and the losses that it leaves behind."""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from nursery import Child, Nursery

from unisono.data import Permutation
from unisono.data.order.permutation import pair_generator
from unisono.observe.events import events_path, number, read_events

FOLDER = Path(__file__).parents[2] / "examples" / "ported"
BEFORE = Path(__file__).with_name("ported_before.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCH = [sys.executable, "-m", "unisono", "launch", "-n", "2", "--", sys.executable]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Losses of the steps of a run, and the values of its evaluations, each in their order."""

    losses: list[float]
    evaluations: list[dict[str, float]]


def printed(folder: Path) -> Numbers:
    """What a script printed: ``step N loss X`` and ``held out: NAME X …``."""
    text = (folder / "output.log").read_text()
    steps = re.findall(r"^step (\d+) loss (\S+)$", text, re.M)
    assert [int(step) for step, _ in steps] == list(range(1, len(steps) + 1)), text
    held_out = [line.split() for line in re.findall(r"^held out: (.*)$", text, re.M)]
    return Numbers(
        losses=[float(loss) for _, loss in steps],
        evaluations=[dict(zip(words[::2], map(float, words[1::2]), strict=True)) for words in held_out],
    )


def trainer_state(folder: Path) -> Numbers:
    """What ``Trainer.save_state`` of transformers wrote."""
    (path,) = folder.glob("*/trainer_state.json")
    history = json.loads(path.read_text())["log_history"]
    return Numbers(
        losses=[entry["loss"] for entry in history if "loss" in entry],
        evaluations=[
            {name: entry[f"eval_{name}"] for name in ("loss", "accuracy") if f"eval_{name}" in entry}
            for entry in history
            if "eval_loss" in entry
        ],
    )


def csv_logger(folder: Path) -> Numbers:
    """What Lightning's ``CSVLogger`` wrote."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return Numbers(
        losses=[float(row["train_loss"]) for row in rows if row["train_loss"]],
        evaluations=[{name: float(row[f"val_{name}"]) for name in ("loss", "mae")} for row in rows if row["val_loss"]],
    )


def events(folder: Path) -> Numbers:
    """What a ``Trainer`` of unisono wrote."""
    found = list(read_events(events_path(folder / "runs" / "after", 0)).events)
    prefix = "eval/"
    return Numbers(
        losses=[number(event["train/loss"]) for event in found if event["kind"] == "step"],
        evaluations=[
            {name.removeprefix(prefix): number(value) for name, value in event.items() if name.startswith(prefix)}
            for event in found
            if event["kind"] == "eval"
        ],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A ported program: ``num_samples`` are shuffled in each of ``epochs``, ``batch`` make a step, ``read`` reads ``before``.

    ``beta`` are the parameters of the shares that mixup draws for each pair of neighbours; ``before`` runs by ``launcher``.
    """

    num_samples: int
    batch: int
    epochs: int
    steps: int
    read: Callable[[Path], Numbers] = printed
    beta: tuple[float, float] | None = None
    launcher: tuple[str, ...] = ()
    environment: str = ""

    def draws(self) -> dict[str, list[list[int]] | list[float]]:
        """What ``Trainer`` draws with seed 0."""
        order = Permutation(self.num_samples, seed=0)
        pairs = [step * self.batch + slot for step in range(self.steps) for slot in range(0, self.batch, 2)]
        return {
            "epochs": [
                order(np.arange(self.num_samples) + epoch * self.num_samples).tolist() for epoch in range(self.epochs)
            ],
            "mixup": [pair_generator(0, pair).beta(*self.beta) for pair in pairs] if self.beta else [],
        }


def run_before(name: str, program: Program, folder: Path, nursery: Nursery) -> Numbers:
    """The numbers of the original."""
    draws = folder / "draws.json"
    draws.write_text(json.dumps(program.draws()))
    script = str(FOLDER / name / "before.py")
    if program.launcher or program.environment:
        python = os.environ[program.environment] if program.environment else sys.executable
        launcher = program.launcher or (python,)
        command = [*launcher, str(BEFORE), script, str(draws)]
        try:
            _run(command, folder)
        except AssertionError as error:
            # torch's own: seen once in many runs, in a process of Gloo that had printed all and was about to exit
            if "terminate called without an active exception" not in str(error):
                raise
            _run(command, folder)
    else:
        facts = {"program": script, "draws": str(draws), "folder": str(folder)}
        _end(nursery.start("ported:before", facts, log=folder / "output.log"), folder)
    return program.read(folder)


def run_after(name: str, folder: Path, nursery: Nursery) -> Numbers:
    """The numbers of the ported program, as ``python after.py`` runs it."""
    facts = {"program": str(FOLDER / name / "after.py"), "folder": str(folder)}
    _end(nursery.start("ported:after", facts, log=folder / "output.log"), folder)
    return events(folder)


def launch_after(name: str, launcher: list[str], folder: Path) -> Numbers:
    """The numbers of the ported program under ``launcher``."""
    _run([*launcher, str(FOLDER / name / "after.py")], folder)
    return events(folder)


def before(facts: Mapping[str, str]) -> int:
    import ported_before

    return ported_before.main(facts["program"], facts["draws"], facts["folder"])


def after(facts: Mapping[str, str]) -> int:
    os.chdir(facts["folder"])
    sys.argv = [facts["program"]]
    runpy.run_path(facts["program"], run_name="__main__")
    return 0


def _end(child: Child, folder: Path) -> None:
    try:
        code = child.exit_code(150.0)
    finally:
        child.kill()
    assert code == 0, (folder / "output.log").read_text()


def _run(command: list[str], folder: Path) -> None:
    # torch's own programs may end without a flush of what they have printed
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONUNBUFFERED": "1"}
    with (folder / "output.log").open("w") as log:
        done = subprocess.run(
            command, cwd=folder, env=environ, stdout=log, stderr=subprocess.STDOUT, timeout=170, check=False
        )
    assert done.returncode == 0, (folder / "output.log").read_text()
