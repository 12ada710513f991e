"""The command line as a user types it: in this process where that is the same, in a process of its own where it is not."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from unisono.cli.main import entry
from unisono.observe.events import events_path, read_events


@dataclass(frozen=True)
class Outcome:
    """What a command left behind on the terminal."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which must be one JSON object and nothing else."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        assert self.out.count("\n") == 1
        return found


@dataclass(frozen=True)
class Desk:
    """A working folder with a small corpus in it, and a cache of its own."""

    folder: Path
    cache: Path

    @property
    def settings(self) -> list[str]:
        """A run that takes no time: 7.5 k parameters, windows of 16 bytes."""
        values = {
            "data.corpus": self.folder / "corpus",
            "data.cache_dir": self.cache / "data",
            "data.seq_len": 16,
            "model.num_layers": 1,
            "model.dim": 16,
            "model.num_heads": 2,
            "model.num_kv_heads": 1,
            "plan.global_batch": 4,
            "plan.precision": "fp32",
            "train.steps": 4,
            "train.num_eval_samples": 4,
            "train.eval_every_steps": 2,
            "observe.console": "plain",
        }
        return [f"--set={key}={value}" for key, value in values.items()]

    @property
    def environ(self) -> dict[str, str]:
        return {"XDG_CACHE_HOME": str(self.cache), "XDG_STATE_HOME": str(self.cache / "state"), "OMP_NUM_THREADS": "1"}

    def here(self, *arguments: str) -> Outcome:
        """``unisono ARGUMENTS`` in this process, in the working folder."""
        out, err = io.StringIO(), io.StringIO()
        before, level = Path.cwd(), logging.getLogger("unisono").level
        handlers = list(logging.root.handlers)
        os.chdir(self.folder)
        code: Any = None
        try:
            with (
                mock.patch.dict(os.environ, self.environ),
                mock.patch.object(sys, "argv", ["unisono", *arguments]),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                try:
                    entry()
                except SystemExit as end:
                    code = end.code
        finally:
            os.chdir(before)
            logging.root.handlers[:] = handlers
            logging.getLogger("unisono").setLevel(level)
        assert isinstance(code, int)
        return Outcome(code, out.getvalue(), err.getvalue())

    def child_environ(self, **environ: str) -> dict[str, str]:
        """The environment of a process of this desk."""
        path = os.pathsep.join(filter(None, [environ.pop("PYTHONPATH", ""), *sys.path]))
        return os.environ | self.environ | {"PYTHONPATH": path} | environ

    def process(self, *arguments: str, python: list[str] | None = None, **environ: str) -> Outcome:
        """The same in a process of its own. Nothing it started is left when this returns."""
        done = subprocess.run(
            [sys.executable, *(python or ["-m", "unisono"]), *arguments],
            cwd=self.folder,
            env=self.child_environ(**environ),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def train(self, run_dir: Path | str, *arguments: str) -> Outcome:
        """``unisono train --debug`` of the small run, here."""
        return self.here("train", "--debug", f"--set=run.dir={run_dir}", *self.settings, *arguments)


def make_desk(folder: Path, cache: Path) -> Desk:
    """Writes the corpus: six files of 600 bytes, of which the hash holds one out."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(6):
        lines = [f"def f{number}_{i}(x):\n    return x + {(number * 37 + i * 11) % 100}\n" for i in range(16)]
        (corpus / f"m{number}.py").write_text("\n".join(lines))
    return Desk(folder, cache)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The ``step`` events of rank 0, over all attempts."""
    return [event for event in events_of(run_dir) if event["kind"] == "step"]


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """All events of rank 0."""
    return list(read_events(events_path(run_dir, 0)).events)


def losses_of(run_dir: Path) -> list[float]:
    """The training loss of every step that was made."""
    return [event["train/loss"] for event in steps_of(run_dir)]


def problem(given: str, rule: str, consequence: str, nearest: str) -> str:
    """What the command line prints for one problem."""
    return f"unisono: {given}\n  rule: {rule}\n  so:   {consequence}\n  try:  {nearest}\n"


Train = Callable[..., Outcome]
