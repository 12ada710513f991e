"""SIGTERM ends a command as Ctrl-C does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from unisono.cli.termination import sigterm_interrupts


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
