"""Whole asynchronous runs, looked at from outside: the job's secret is nowhere, and nobody listens beyond the named interface."""

from __future__ import annotations

import base64
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import Desk
from procs import command_lines, listening, wait_until

from unisono.observe.events import events_path, read_events

DRIVER = Path(__file__).parents[1] / "support" / "known_secret.py"


def forms(secret: bytes) -> set[bytes]:
    """How it could be written down: raw, in hexadecimal, in base64 wherever it begins in a longer text, as Python and JSON do."""
    shifted = [base64.b64encode(bytes(shift) + secret)[4 * shift // 3 + 2 : -4] for shift in range(3)]
    spelled = [repr(secret)[2:-1].encode(), str(list(secret))[1:-1].encode()]
    found = {secret, secret.hex().encode(), secret.hex().upper().encode(), *shifted, *spelled}
    return found | {text.translate(bytes.maketrans(b"+/", b"-_")) for text in shifted}


def test_a_secret_is_found_however_it_is_written() -> None:
    secret = secrets.token_bytes(32)
    for before in (b"", b"a", b"ab", b"abc"):
        for text in (
            before + secret,
            base64.b64encode(before + secret + b"more"),
            base64.urlsafe_b64encode(before + secret),
            repr(before + secret).encode(),
            secret.hex().encode(),
        ):
            assert any(form in text for form in forms(secret)), (before, text)


def places(family: list[psutil.Process], folders: list[Path]) -> Iterator[tuple[str, bytes]]:
    """What others could read: arguments of all, environments of a run's processes, files."""
    yield "command lines", command_lines().encode(errors="surrogateescape")
    for process in family:
        for name in ("environ", "cmdline"):
            try:
                yield f"{name} of {process.pid}", Path(f"/proc/{process.pid}/{name}").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                yield str(path), path.read_bytes() if path.is_file() else b""
            except OSError:
                continue


@pytest.mark.full
@pytest.mark.parametrize("starter", ["launch", "torchrun"])
def test_the_secret_of_a_whole_run_is_nowhere(desk: Desk, tmp_path: Path, starter: str) -> None:
    secret, folder, launch = secrets.token_bytes(32), tmp_path / "run", tmp_path / "launch"
    file = tmp_path / "kept" / "secret"
    file.parent.mkdir(mode=0o700)
    file.write_bytes(secret)
    settings = {"plan.sync": "dist_async", "run.dir": folder, "train.steps": 1000, "train.eval_every_steps": 0}
    settings |= {
        "checkpoint.every_steps": 250,
        "launch.num_servers": 2,
        "launch.snapshot_every_s": 0.3,
    }
    run = ["train", *desk.settings, *(f"--set={key}={value}" for key, value in settings.items())]
    if starter == "launch":
        command = [
            str(DRIVER),
            str(file),
            "launch",
            "-n",
            "2",
            "--servers",
            "2",
            "--interface",
            "lo",
            f"--dir={launch}",
        ]
        command += ["--", sys.executable, "-m", "unisono", *run]
    else:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(DRIVER), str(file), *run]
    path = os.pathsep.join(filter(None, sys.path))
    environ = os.environ | desk.environ | {"PYTHONPATH": path, "UNISONO_SNAPSHOT_EVERY_S": "0.3"}
    with subprocess.Popen(
        [sys.executable, *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as started:
        try:
            wait_until(lambda: steps(folder) > 30 or started.poll() is not None, "steps are made", 120)
            assert started.poll() is None, started.communicate()[0].decode()
            family = psutil.Process(started.pid).children(recursive=True)
            listeners = {process.pid: listening(process.pid) for process in family if process.is_running()}
            seen = list(places(family, [folder, launch]))
            said, _ = started.communicate(timeout=120)
        finally:
            started.kill()
    assert started.returncode == 0, said.decode()
    seen += [*places([], [folder, launch]), ("what it said", said)]
    names = " ".join(name for name, _ in seen)
    assert [
        word for word in ("environ of", "snapshot-", "step-00001000", "events", "what it") if word not in names
    ] == []
    assert starter != "launch" or "launch.json" in names
    assert [name for name, text in seen if any(form in text for form in forms(secret))] == []
    if starter == "launch":  # torchrun has a store of its own on all interfaces
        open_ = [where for found in listeners.values() for where in found]
        assert len(open_) >= 2
        assert {where.partition(":")[0] for where in open_} == {"0100007F"}


def steps(run_dir: Path) -> int:
    path = events_path(run_dir, 0)
    return sum(event["kind"] == "step" for event in read_events(path).events) if path.exists() else 0
