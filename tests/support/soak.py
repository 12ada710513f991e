"""A run of ``unisono train`` that is killed at random again and again, and then left to finish.

Everything is drawn from a seed: SOAK_SEED, or else the commit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from budget import commit_hash
from procs import is_running, marked, wait_until

CONFIG = Path(__file__).with_name("soak_run.py")
WHOLE_S, SLICE_S = 600.0, 60.0
# of a case, from its beginning to its end: bounds a broken one; three at once on two slow cores take 300 s and more
LIMIT_S = 900.0
# with fewer it was no soak
LEAST_KILLS = 2
# within which what was killed starts again and the run saves a step that it had not saved before
PROGRESS_S = 60.0


def seed() -> str:
    """What kills are drawn from."""
    return os.environ.get("SOAK_SEED") or commit_hash()


class Soaked:
    """A run in ``folder``, with all its starts. ``mark`` is in the environment of its processes but the reaper."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.run_dir, self.mark, self.num_starts = folder / "run", uuid.uuid4().hex, 0
        self.log, self.hold = folder / "launcher.log", folder / "hold"
        self.settings = settings
        self._folder = folder
        self.launcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.num_starts += 1
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(CONFIG.parent), *filter(None, sys.path)]),
            "SOAK_HOLD": str(self.hold),
            "SOAK_MARK": self.mark,
        }
        with self.log.open("a") as log:
            self.launcher = subprocess.Popen(
                [
                    *[sys.executable, "-m", "unisono", "train", str(CONFIG)],
                    *(f"--set={key}={value}" for key, value in {**self.settings, "run.dir": self.run_dir}.items()),
                ],
                cwd=self._folder,
                env=environ,
                stdout=log,
                stderr=log,
            )

    def saved_step(self) -> int:
        """The newest step with a committed checkpoint, 0 for none."""
        commits = (self.run_dir / "checkpoints").glob("step-*/COMMIT")
        return max((int(path.parent.name.removeprefix("step-")) for path in commits), default=0)

    def num_steps(self, rank: int) -> int:
        """Steps in the events of this rank, repeated ones too."""
        path = self.run_dir / f"events/rank{rank:05d}.jsonl"
        return path.read_bytes().count(b'"kind":"step"') if path.exists() else 0

    def num_restarts(self) -> int:
        """Of all ranks at once, or of one process."""
        return self.log.read_text().count("launch: restarting ")

    def find(self, victim: str) -> psutil.Process | None:
        """``launcher``, ``rank N`` or ``server N``; None while it does not run."""
        assert self.launcher is not None
        with suppress(psutil.Error):
            process = psutil.Process(self.launcher.pid)
            if victim == "launcher":
                return process
            role, number = victim.split()
            for child in process.children(recursive=True):
                with suppress(psutil.Error):
                    if child.status() != psutil.STATUS_ZOMBIE and _is(role, number, child):
                        return child
        return None

    def kill(self, victim: str) -> bool:
        """SIGKILL. After that of the launcher nothing of the job is left, and it is started again. False if it did not run."""
        assert self.launcher is not None
        self.assert_runs()
        process = self.find(victim)
        if process is None:
            return False
        family = [self.launcher.pid, *(each.pid for each in psutil.Process(self.launcher.pid).children(recursive=True))]
        process.send_signal(signal.SIGKILL)
        if victim == "launcher":
            self.launcher.wait()
            wait_until(lambda: not marked(self.mark), "no process of a killed launcher is left", 20)
            wait_until(lambda: not any(map(is_running, family)), "its reaper is gone too", 20)
            self.start()
        else:
            wait_until(lambda: not is_running(process.pid), f"{victim} is gone")
        return True

    def assert_runs(self) -> None:
        assert self.launcher is not None
        assert self.launcher.poll() is None, f"the launcher ended with {self.launcher.returncode}"

    def wait_for_progress(self, num_ranks: int, victims: list[str]) -> None:
        """Until all run, each rank has made steps, and one was saved that had not been."""
        self._until(lambda: all(self.find(victim) for victim in victims), f"{victims} run")
        saved, steps = self.saved_step(), [self.num_steps(rank) for rank in range(num_ranks)]
        self._until(lambda: self.saved_step() > saved, f"a step after {saved} is saved")
        self._until(
            lambda: all(self.num_steps(rank) >= steps[rank] + 3 for rank in range(num_ranks)), "every rank makes steps"
        )

    def _until(self, condition: Any, what: str) -> None:
        def there() -> bool:
            self.assert_runs()
            return condition()

        wait_until(there, what, PROGRESS_S)

    def finish(self, timeout_s: float = 400.0) -> None:
        """At full speed, to the end."""
        assert self.launcher is not None
        self.hold.unlink(missing_ok=True)
        code = self.launcher.wait(timeout_s)
        assert code == 0, f"the launcher ended with {code}"

    def close(self) -> None:
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
            wait_until(lambda: not marked(self.mark), "no process of a killed launcher is left", 20)


def _is(role: str, number: str, process: psutil.Process) -> bool:
    command, environ = process.cmdline(), process.environ()
    if role == "rank":
        return "train" in command and environ.get("UNISONO_RANK") == number and "UNISONO_SERVER" not in environ
    return "unisono.kvstore.server" in command and environ.get("UNISONO_SERVER") == number


def soak(run: Soaked, victims: list[str], seconds: float, steps: int, draw: random.Random) -> list[str]:
    """Kill ``victims`` for so long, each about equally often, then let the run make the rest of ``steps``. Returns the kills.

    The time counts from when the job is up, so that a slow start does not shorten it. The steps must not run out before.

    Between two kills the run makes progress, except that every third, about, is followed by another while what was killed starts
    again. No two servers are killed together: with a replica each, acknowledged pushes survive the loss of one.
    """
    ranks = int(run.settings["launch.num_processes"])
    done, deck = list[str](), _dealt(victims, draw)
    run.hold.touch()
    run.start()
    try:
        run.wait_for_progress(ranks, victims)
        begun = time.monotonic()
        while len(done) < LEAST_KILLS or time.monotonic() - begun < seconds:
            assert run.saved_step() < steps - 25, f"the steps ran out after {time.monotonic() - begun:.1f} s"
            time.sleep(draw.uniform(0, 2.5))
            victim = next(deck)
            again = draw.choice(
                [each for each in victims if not (victim.startswith("s") and each.startswith("s"))] or [""]
            )
            hasty, wait_s = draw.random() < 0.35 and again != "", draw.uniform(0, 5)
            killed_s, saved = time.monotonic() - begun, run.saved_step()
            if run.kill(victim):
                done.append(f"{killed_s:.1f} s, {saved} steps saved: {victim}")
            if hasty:
                time.sleep(wait_s)
                if run.kill(again):
                    done.append(f"and {wait_s:.1f} s later: {again}")
            run.wait_for_progress(ranks, victims)
        run.finish()
    except BaseException as error:
        error.add_note(f"SOAK_SEED={seed()}: {seconds:g} s, killed {done}\n{run.log.read_text()[-6000:]}")
        raise
    finally:
        run.close()
    return done


def _dealt(victims: list[str], draw: random.Random) -> Iterator[str]:
    while True:
        yield from draw.sample(victims, len(victims))
