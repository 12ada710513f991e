"""SIGTERM ends a command as Ctrl-C does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.cli.termination import sigterm_interrupts
from unisono.exit_codes import REQUEUE


def test_sigterm_interrupts_and_its_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_ends_the_process_at_once() -> None:
    program = (
        f"import signal, sys; sys.path[:] = {sys.path!r}\n"
        "from unisono.cli.termination import sigterm_interrupts\n"
        "with sigterm_interrupts():\n"
        "    try:\n        signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n        print('cleans up', flush=True)\n        signal.raise_signal(signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "cleans up\n", "")


def stopped_while_writing(folder: Path, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """``unisono ARGUMENTS``, to which SIGTERM comes when the first file or folder in ``folder`` is written and gets its name."""
    program = (
        f"import os, runpy, signal, sys; sys.path[:] = {sys.path!r}; sys.argv = ['unisono', *{arguments!r}]\n"
        "def stop(event, arguments):\n"
        f"    if event == 'os.rename' and str(arguments[0]).startswith({str(folder)!r}):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.addaudithook(stop)\n"
        "runpy.run_module('unisono', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


MODEL = str(Path(__file__).parents[1] / "interop" / "models" / "models_resnet_bottleneck.ckpt")


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpoint", "import", MODEL, "--out", "OUT/new.safetensors"),
        ("checkpoint", "import", MODEL, "--out", "OUT/new", "--as=auto", "--set=image_size=33"),
        ("checkpoint", "export", "RUN", "OUT/new"),
        ("data", "convert", "TABLE", "OUT/new.parquet"),
        pytest.param(("checkpoint", "export", "RUN", "OUT/new.params", "--format=mxnet"), marks=pytest.mark.full),
        pytest.param(("checkpoint", "export", "RUN", "OUT/new.ckpt", "--format=mindspore"), marks=pytest.mark.full),
        pytest.param(("quantize", "RUN", "--scheme=int8", "--out=OUT/new"), marks=pytest.mark.full),
        pytest.param(("prune", "RUN", "--sparsity=0.5", "--out=OUT/new"), marks=pytest.mark.full),
    ],
)
def test_sigterm_while_a_result_is_written_leaves_nothing(
    trained: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    table = trained.parent / "table.csv"
    table.write_text("a,b\n1,2\n")
    places = {"RUN": str(trained), "TABLE": str(table), "OUT": str(tmp_path)}
    for name, place in places.items():
        arguments = tuple(argument.replace(name, place) for argument in arguments)
    done = stopped_while_writing(tmp_path, arguments)
    assert (done.returncode, done.stderr.strip()) == (REQUEUE, "unisono: interrupted")
    assert list(tmp_path.iterdir()) == []
