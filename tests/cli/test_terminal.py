"""Terminal sequences in names, records, messages and generated text are shown as text, and never obeyed."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import Desk, Outcome
from PIL import Image

from unisono.cli.terminal import clean_log_messages
from unisono.data.recordio import RecordWriter
from unisono.errors import Problem

EVIL = "a\x1b[2J\x1b]0;owned\x07\x9b31m\u202eb\r"
SHOWN = r"a\x1b[2J\x1b]0;owned\x07\x9b31m\u202eb\x0d"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def inert(done: Outcome) -> str:
    """What a command printed, which has no control characters but newlines and tabs."""
    said = done.out + done.err
    assert CONTROL.findall(said) == []
    return said


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / f"{EVIL}.jsonl"
    path.write_text("\n".join(json.dumps({EVIL: EVIL, "n": number}, ensure_ascii=False) for number in range(3)))
    return path


def test_columns_values_and_names_of_files(desk: Desk, table: Path) -> None:
    for command in ("inspect", "verify", "stats"):
        said = inert(desk.here("data", command, str(table)))
        assert f"{SHOWN}.jsonl" in said, command
    inspected = inert(desk.here("data", "inspect", str(table)))
    assert inspected.count(r"\x1b]0;owned") >= 7  # the file, and of three rows the column and its value


def test_json_escapes_by_itself(desk: Desk, table: Path) -> None:
    done = desk.here("data", "inspect", str(table), "--json")
    inert(done)
    assert done.json["path"] == str(table)


def test_classes_of_images(desk: Desk, tmp_path: Path) -> None:
    for name in (EVIL, "other"):
        (tmp_path / "album" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "album" / name / "1.png")
    (tmp_path / "album" / EVIL / f"{EVIL}.png").write_bytes(b"no image")
    done = desk.here("data", "pack", str(tmp_path / "album"), str(tmp_path / "a.rec"), "--workers", "0", "-v")
    assert done.code == 2
    assert SHOWN in inert(done)


def test_files_that_are_not_there(desk: Desk) -> None:
    assert f"{SHOWN}.rec" in inert(desk.here("data", "inspect", f"{EVIL}.rec"))
    assert SHOWN in inert(desk.here("train", f"{EVIL}.toml"))
    assert r"\u001b]0;owned" in inert(desk.here("train", f"--set=run.name={EVIL}", "--set=x=1"))  # as TOML


def test_wrong_command_lines(desk: Desk) -> None:
    for arguments in (["train", f"--{EVIL}"], [EVIL], ["data", "convert", "a", "b", EVIL]):
        assert r"\x1b]0;owned" in inert(desk.here(*arguments))


def test_a_value_of_a_configuration(desk: Desk, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f"[data]\ncorpus = {json.dumps(EVIL)}\n")
    for more in ([], ["--origin"]):
        done = desk.here("config", "show", str(config), *more)
        assert done.code == 0
        inert(done)


def test_an_exception_of_a_configuration(desk: Desk, tmp_path: Path) -> None:
    config = tmp_path / "run.py"
    config.write_text(f"def config():\n    raise ValueError({EVIL!r})\n")
    assert f"ValueError: {SHOWN}" in inert(desk.here("train", str(config)))


def test_an_exception_that_is_not_ours(desk: Desk, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError(EVIL)

    monkeypatch.setattr("unisono.data.convert.file_kind.file_kind", raises)
    done = desk.here("data", "inspect", str(table))
    assert done.code == 1
    assert f"RuntimeError: {SHOWN}" in inert(done)


def test_log_messages_with_and_without_a_level(desk: Desk) -> None:
    program = f"""
import logging, sys
from unisono.cli.main import cli, entry
import click
@cli.command("say")
def say(): logging.getLogger("unisono.data").warning("%s ftp://me:secret@host", {EVIL!r})
cli.list_commands, cli.get_command = (lambda c: ["say"]), (lambda c, n: say)
sys.argv = ["unisono", "say"]
entry()
"""
    done = desk.process(python=["-c", program])
    assert inert(done) == f"{SHOWN} ftp://[redacted]@host\n"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "a.rec"
    with RecordWriter(path) as writer:
        writer.write(EVIL.encode() + b"\xff\n")
    return path


def test_a_pipe_gets_the_bytes_of_a_record(desk: Desk, record: Path) -> None:
    command = [sys.executable, "-P", "-m", "unisono", "data", "cat", str(record), "--index", "0"]
    environ = os.environ | desk.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    assert done.stdout == EVIL.encode() + b"\xff\n"


def test_a_terminal_gets_the_text_of_a_record(desk: Desk, record: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "unisono", "data", "cat", str(record), "--index", "0"]
    environ = os.environ | desk.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        subprocess.run(command, env=environ, stdout=theirs, check=True)
    finally:
        os.close(theirs)
    shown = os.read(ours, 10_000)
    os.close(ours)
    assert shown.replace(b"\r\n", b"\n").decode() == SHOWN + "\\xff\n\n"


@pytest.mark.full
def test_generated_text(desk: Desk, trained: Path) -> None:
    done = desk.here("generate", str(trained), "--temperature", "9", "--tokens", "400", "--prompt", EVIL)
    assert done.code == 0, done.err
    said = inert(done)
    assert said.startswith(SHOWN)
    assert len(re.findall(r"\\x[01][0-9a-f]", said)) > 10  # of 400 bytes about a tenth are control characters
    exact = desk.here("generate", str(trained), "--temperature", "9", "--tokens", "400", "--prompt", EVIL, "--json")
    assert EVIL in exact.json["text"]


@pytest.mark.full
def test_what_a_launch_says_of_its_processes(desk: Desk, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.stderr = open('/dev/null', 'w')\nraise ValueError({EVIL!r})\n")
    done = desk.process(
        *("launch", "-n", "2", "--servers", "1", "--dir", str(tmp_path / "launch"), "--max-restarts", "0", "--"),
        *(sys.executable, str(script)),
    )
    assert done.code == 1
    # white space at the end of a traceback is left out; the other rank may be ended before it fails itself
    assert "ValueError: " + SHOWN.removesuffix(r"\x0d") in inert(done)


def test_plain_log_messages_stay_as_they_are() -> None:
    clean_log_messages()
    assert logging.lastResort is not None
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "plain %s", ("text",), None)
    assert logging.lastResort.format(record) == "plain text"


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (["diagnose", "RUN"], ""),
        (["compare", "RUN", "RUN", "--json"], ""),
        (["compare", "RUN", "RUN"], "1"),
        (["top", "RUN", "--once"], ""),
        (["top", "--help"], ""),
    ],
)
def test_a_full_disk_behind_the_output_is_one_line(
    desk: Desk, trained: Path, arguments: list[str], unbuffered: str
) -> None:
    command = [str(trained) if word == "RUN" else word for word in arguments]
    assert to_full_disk(desk, command, unbuffered) == (
        1,
        "unisono: the output cannot be written: No space left on device\n",
    )


def test_a_full_disk_behind_the_bytes_of_a_record(desk: Desk, record: Path) -> None:
    code, said = to_full_disk(desk, ["data", "cat", str(record), "--index", "0"])
    assert (code, said) == (1, "unisono: the output cannot be written: No space left on device\n")


def to_full_disk(desk: Desk, arguments: list[str], unbuffered: str = "") -> tuple[int, str]:
    """Exit code and standard error of a command whose standard output has no room left."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "unisono", *arguments],
            env=desk.child_environ(PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
    return done.returncode, done.stderr


def test_other_errors_of_the_system_keep_their_traceback(
    desk: Desk, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unisono.data.convert.file_kind.file_kind", raises)
    done = desk.here("data", "inspect", str(table))
    assert done.code == 1
    assert done.err.startswith("Traceback")


def test_a_name_of_a_file_is_on_one_line_of_an_error(desk: Desk) -> None:
    name = "a\n  try:  rm -r x\nb.csv"
    (desk.folder / name).write_text("x\n")
    done = desk.here("config", "show", name)
    assert done.err.count("\n") == 4, done.err
    assert done.err.startswith("unisono: a   try:  rm -r x b.csv is neither TOML nor Python\n")
    assert str(Problem(given="2 bad:\n    a\n    b", rule="r", consequence="c", nearest="n")).startswith(
        "2 bad:\n    a\n    b\n"
    )
