"""Folders of ``unisono tune``: files of others stay as they are, and a command that was killed goes on."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Desk, problem
from procs import wait_until

from unisono.tune import search_page

pytest.importorskip("optuna")

SPACE = "--space=optim.lr=log:1e-4..1e-2"
RULE = "results are written into a folder, which needs room for them and for intermediate files"
CONSEQUENCE = "the command is not finished; what was written before is kept"
ROOM = "room there, and the right to write there; then run the same command again"
GIVEN = {"params": [SPACE, "--trials=1"], "folds": ["--folds=2"], "lr": [], "batch": [], "system": ["--pairs=1"]}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def table(folder: Path) -> list[str]:
    """Settings of a training that every command takes."""
    path = folder / "table.csv"
    path.write_text("a,price\n" + "".join(f"{number},{2 * number}\n" for number in range(30)))
    settings = {"task.kind": "table", "task.predicts": "number", "task.target": "price", "data.train": path}
    settings |= {"train.steps": 3, "plan.global_batch": 8}
    return [f"--set={name}={value}" for name, value in settings.items()]


FILES = {
    **{"report.html": "<p>of the user</p>", "report.json": "{}", "best.toml": "[optim]\nlr = 1\n", "mail.txt": "x"},
    **{"journal.jsonl": '{"text": "a row without an end"}', "trials/0000.output.txt": "of the user"},
}


@pytest.mark.parametrize("verb", GIVEN)
@pytest.mark.parametrize("name", FILES)
def test_files_of_the_user_stay(desk: Desk, tmp_path: Path, verb: str, name: str) -> None:
    out = tmp_path / "out"
    place = out / name
    place.parent.mkdir(parents=True)
    place.write_text(FILES[name])
    done = desk.here("tune", verb, *table(tmp_path), *GIVEN[verb], f"--out={out}")
    assert done.code == 2, done.out
    is_record = name == {"system": "report.json", "batch": "report.json"}.get(verb, "journal.jsonl")
    if not is_record or verb == "lr":
        assert f"--out {out}, which holds other files, such as {name.partition('/')[0]}\n" in done.err
    assert "nothing was started" in done.err
    assert {path: text for path, text in contents(out).items() if not path.startswith(".")} == {
        name: FILES[name].encode()
    }


@pytest.mark.parametrize("verb", [*GIVEN, "coord-check"])
@pytest.mark.parametrize(
    ("place", "reason", "nearest"),
    [
        ("table.csv/out", "ENOTDIR, Not a directory", "another folder (--out)"),
        ("/proc/none/out", "ENOENT, No such file or directory", ROOM),
        ("locked/runs/out", "EACCES, Permission denied", ROOM),
    ],
)
def test_a_folder_that_cannot_be_made(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, place: str, reason: str, nearest: str
) -> None:
    given = desk.settings if verb == "coord-check" else [*table(tmp_path), *GIVEN[verb]]
    (tmp_path / "table.csv").touch()
    (tmp_path / "locked").mkdir()
    real = Path.mkdir

    def mkdir(folder: Path, *arguments: Any, **options: Any) -> None:
        if folder.parent == tmp_path / "locked":  # where this user has not the right to
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        real(folder, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    out = tmp_path / place
    done = desk.here("tune", verb, *given, f"--out={out}")
    assert done.err == problem(f"{out}, which cannot be written: {reason}", RULE, CONSEQUENCE, nearest)
    assert done.code == 2


def test_a_disk_that_is_full_when_a_page_is_written(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, *parts: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(search_page, "write_atomically", write)
    out = tmp_path / "out"
    done = desk.here("tune", "params", *table(tmp_path), SPACE, "--max-s=1e-9", f"--out={out}")
    reason = "ENOSPC, No space left on device"
    assert done.err == problem(f"{out}, which cannot be written: {reason}", RULE, CONSEQUENCE, ROOM)
    assert done.code == 2


def test_a_full_disk_behind_the_output_is_none_of_the_folder(desk: Desk, tmp_path: Path) -> None:
    given = [*table(tmp_path), SPACE, "--max-s=1e-9", f"--out={tmp_path / 'out'}"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "unisono", "tune", "params", *given],
            cwd=desk.folder, env=desk.child_environ(), stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "unisono: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    "left", [["trials"], ["trials", ".journal.lock"], ["trials", ".journal.lock", "journal.jsonl"]]
)
def test_what_a_killed_start_leaves_is_no_file_of_others(desk: Desk, tmp_path: Path, left: list[str]) -> None:
    out = tmp_path / "out"
    (out / "trials").mkdir(parents=True)
    for name in left[1:]:
        (out / name).touch(mode=0o600)
    done = desk.here("tune", "params", *table(tmp_path), *GIVEN["params"], f"--out={out}", "--json")
    assert done.code == 0, done.err
    assert [trial["outcome"] for trial in done.json["trials"]] == ["done"]


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_search_of_the_largest_batch_goes_on(desk: Desk, tmp_path: Path, sent: signal.Signals) -> None:
    out = tmp_path / "out"
    given = [*table(tmp_path), f"--out={out}", "--max-micro-batch=4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "unisono", "tune", "batch", *given],
        cwd=desk.folder, env=desk.child_environ(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: (out / "trials" / "2").exists(), "the second training", timeout_s=90.0)
    process.send_signal(sent)
    said = process.communicate(timeout=90)[1]
    if sent == signal.SIGTERM:
        assert f"interrupted; the same command goes on in {out}" in said
        assert process.returncode == 75
    assert "The search has not ended." in (out / "report.html").read_text()
    (first,) = json.loads((out / "report.json").read_text())["probes"]
    began_ns = os.stat(out / "trials" / "1" / "config.toml").st_mtime_ns
    done = desk.here("tune", "batch", *given, "--json")
    assert done.code == 0, done.err
    assert done.json["probes"][0] == first
    assert [probe["micro_batch"] for probe in done.json["probes"]] == [1, 2, 4]
    assert os.stat(out / "trials" / "1" / "config.toml").st_mtime_ns == began_ns
    other = desk.here("tune", "batch", *given, "--set=optim.lr=0.5")
    assert other.code == 2
    assert "optim.lr 0.5 for the search of the largest micro-batch" in other.err
