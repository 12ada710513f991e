"""Ctrl-C during ``Trainer.fit()`` in a script and in a notebook."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from procs import wait_until

from unisono.dist.stop_notice import INTERRUPTED

SETUP = """
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from unisono import PlanOptions, TrainOptions, Trainer
from unisono.data.dataset import as_dataset

FOLDER = Path({folder!r})


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs):
        (FOLDER / "stepping").touch()
        time.sleep(PAUSE_S)
        return self.layer(inputs)


def squared(outputs, batch):
    error = outputs - batch["targets"]
    return error.square().sum(), torch.tensor(float(error.numel()))


xs = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
pairs = list(zip(xs, 2 * xs, strict=True))
PAUSE_S = 0.02
trainer = Trainer(
    Slow(), pairs, objective=squared, plan=PlanOptions(global_batch=8, precision="fp32"), eval_data=as_dataset(pairs[:8]),
    options=TrainOptions(steps=100000, eval_every_steps=1, num_eval_samples=8), run_dir=FOLDER / "run",
)
"""
FIT = """
with trainer as run:
    result = run.fit()
print(result.reason, result.step > 0, sorted(result.evaluation))
"""


def start(folder: Path, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupted(folder: Path, script: str, times: int) -> tuple[int, str, str]:
    """Exit code, standard output and error of a script that gets Ctrl-C, as its whole group, while it makes steps."""
    child = start(folder, script)
    try:
        wait_until(lambda: (folder / "stepping").exists(), "the first step is under way", 60)
        for _ in range(times):
            os.killpg(child.pid, signal.SIGINT)
            threading.Event().wait(0.5)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: not group_exists(child.pid), "no process of the script is left", 10)
    return child.returncode, out, err


def group_exists(group: int) -> bool:
    """Whether a process group has members; one that ended is a member until init, which may take a moment, has waited for it."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    "fit", [FIT, FIT.replace("with trainer as run:\n    result = run.fit()", "result = trainer.fit()")]
)
def test_an_interrupted_script_prints_one_line_and_gets_its_result(tmp_path: Path, fit: str) -> None:
    code, out, err = interrupted(tmp_path, SETUP.format(folder=str(tmp_path)) + fit, 1)
    assert code == 0, err
    assert out.splitlines()[-1] == "preempted True ['loss']"
    assert [line for line in err.splitlines() if "nterrupt" in line] == [INTERRUPTED]
    assert list((tmp_path / "run/checkpoints").glob("step-*/COMMIT"))
    (said,) = [line for line in out.splitlines() if "Preempted at" in line]
    assert "of 100000 steps" in said


@pytest.mark.full
def test_an_interrupted_script_leaves_no_loader_process(tmp_path: Path) -> None:
    workers = (
        "options=TrainOptions(",
        "loader=LoaderOptions(num_workers=2, worker_kind='process'), options=TrainOptions(",
    )
    script = (
        SETUP.format(folder=str(tmp_path))
        .replace(*workers)
        .replace("import PlanOptions", "import LoaderOptions, PlanOptions")
    )
    code, out, err = interrupted(tmp_path, script + FIT, 1)
    assert code == 0, err
    assert out.splitlines()[-1] == "preempted True ['loss']"
    assert err.splitlines() == [INTERRUPTED]


@pytest.mark.full
def test_a_second_interrupt_of_a_script_is_keyboard_interrupt(tmp_path: Path) -> None:
    # one long step: the first Ctrl-C has not ended it when the second comes
    script = SETUP.format(folder=str(tmp_path)).replace("PAUSE_S = 0.02", "PAUSE_S = 60")
    code, out, err = interrupted(tmp_path, script + FIT, 2)
    assert code == -signal.SIGINT  # what Python itself does after a KeyboardInterrupt that nobody catches
    assert "preempted True" not in out
    assert err.splitlines()[0] == INTERRUPTED
    assert err.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.full
def test_a_notebook_survives_an_interrupt_of_either_kind(tmp_path: Path) -> None:
    nbformat: Any = importlib.import_module("nbformat")
    client_module: Any = importlib.import_module("nbclient")
    first = SETUP.format(folder=str(tmp_path)) + FIT
    again = (
        SETUP.format(folder=str(tmp_path / "second")).replace("PAUSE_S = 0.02", "PAUSE_S = 60")
        + "(FOLDER).mkdir()\ntry:\n    with trainer as run:\n        run.fit()\nexcept KeyboardInterrupt:\n"
        + "    print('KeyboardInterrupt')\n"
    )
    children = "import psutil; print(len(psutil.Process().children(recursive=True)))"
    cells = [nbformat.v4.new_code_cell(source) for source in (children, first, again, children, "print('alive')")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = client_module.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})

    def interrupt() -> None:
        for folder, times in ((tmp_path, 1), (tmp_path / "second", 2)):
            wait_until((folder / "stepping").exists, "the first step is under way", 60)
            for _ in range(times):
                os.kill(client.km.provisioner.pid, signal.SIGINT)
                threading.Event().wait(0.5)

    thread = threading.Thread(target=interrupt)
    thread.start()
    client.execute()
    thread.join()
    texts = [{each["name"]: each["text"] for each in cell.outputs if each.output_type == "stream"} for cell in cells]
    before, preempted, second, after, alive = texts
    assert preempted["stdout"] == "preempted True ['loss']\n"
    assert INTERRUPTED in preempted["stderr"]
    assert second["stdout"] == "KeyboardInterrupt\n"
    assert after == before
    assert alive["stdout"] == "alive\n"
