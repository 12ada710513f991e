"""Programs of MXNet and MindSpore in examples/ported: before and after have the same losses, and after on one process and on two.

UNISONO_MXNET_PYTHON and UNISONO_MINDSPORE_PYTHON name interpreters that have mxnet 1.9.1 and mindspore 2.10.0
(tests/peers/venvs.sh).
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "ported"
PEERS = {
    "mxnet_gluon_mlp": "UNISONO_MXNET_PYTHON",
    "mxnet_gluon_lenet": "UNISONO_MXNET_PYTHON",
    "mindspore_lenet": "UNISONO_MINDSPORE_PYTHON",
    "mindspore_functional": "UNISONO_MINDSPORE_PYTHON",
}
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "launch": [sys.executable, "-m", "unisono", "launch", "-n", "2", "--", sys.executable],
}
STEPS = 20
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
}


def run(command: list[str], name: str, script: str, folder: Path) -> str:
    arguments = [*command, str(FOLDER / name / script), str(folder)]
    done = subprocess.run(arguments, cwd=folder, env=ENVIRON, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pack(name: str, folder: Path) -> None:
    """Make the data file, where the program reads one."""
    if (FOLDER / name / "pack.py").exists():
        run([sys.executable], name, "pack.py", folder)


def numbers(text: str) -> tuple[list[float], list[float]]:
    """The losses of the steps, and the accuracy at the end if there is one."""
    rank = r"^(?:\[[^\]]*\] ?)?"
    steps = re.findall(rank + r"step (\d+) loss (\S+)$", text, re.M)
    assert [int(step) for step, _ in steps] == list(range(1, STEPS + 1)), text
    return [float(loss) for _, loss in steps], [float(n) for n in re.findall(rank + r"accuracy (\S+)$", text, re.M)]


@pytest.mark.peer
@pytest.mark.parametrize("name", PEERS)
def test_losses_are_the_peers(name: str, tmp_path: Path) -> None:
    """The same weights and batches. Both compute in fp32, so that rounding alone differs, and the constants that docs name."""
    python = os.environ.get(PEERS[name])
    if not python:
        pytest.skip(f"set {PEERS[name]} to an interpreter with the peer: nothing was compared")
    pack(name, tmp_path)
    losses, accuracy = numbers(run([python], name, "before.py", tmp_path))
    our_losses, our_accuracy = numbers(run([sys.executable], name, "after.py", tmp_path))
    assert our_losses == pytest.approx(losses, rel=1e-4)
    assert our_accuracy == pytest.approx(accuracy, abs=1 / 160)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.full
@pytest.mark.parametrize("name", PEERS)
def test_losses_without_the_peer_are_the_same_under_each_launcher(name: str, tmp_path: Path) -> None:
    """Without the peer's weights, after.py makes its own."""
    outputs: dict[str, tuple[list[float], list[float]]] = {}
    for launcher, command in {"python": [sys.executable], **LAUNCHERS}.items():
        folder = tmp_path / launcher
        folder.mkdir()
        pack(name, folder)
        outputs[launcher] = numbers(run(command, name, "after.py", folder))
    losses, accuracy = outputs["python"]
    assert losses[-1] < 0.5 * losses[0]
    for launcher in LAUNCHERS:
        assert outputs[launcher][0] == pytest.approx(losses, rel=1e-4), launcher
        assert outputs[launcher][1] == pytest.approx(accuracy, abs=1 / 160), launcher


def test_a_program_learns_without_the_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One in the quick tier, in this process."""
    runpy.run_path(str(FOLDER / "mxnet_gluon_lenet" / "after.py"))["main"](tmp_path)
    losses, _ = numbers(capsys.readouterr().out)
    assert losses[-1] < 0.5 * losses[0]
