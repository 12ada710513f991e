"""Signals before a run listens for them, and processes that are started without standard input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Desk, events_of, make_desk

from unisono.exit_codes import REQUEUE
from unisono.launch.workers import is_unisono_train


def signalled_at_import(command: str, name: str) -> subprocess.CompletedProcess[str]:
    """The command line, to which the signal comes while it imports click."""
    program = (
        f"import os, runpy, signal, sys; sys.path[:] = {sys.path!r}; sys.argv = ['unisono', {command!r}]\n"
        "class Killer:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'click':\n            os.kill(os.getpid(), signal.{name})\n"
        "sys.meta_path.insert(0, Killer())\n"
        "runpy.run_module('unisono', run_name='__main__')\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("command", "name", "code"),
    [
        *[(command, name, REQUEUE) for command in ("train", "launch") for name in ("SIGTERM", "SIGINT")],
        ("eval", "SIGTERM", -15),
    ],
)
def test_a_signal_before_anything_large_is_imported(command: str, name: str, code: int) -> None:
    done = signalled_at_import(command, name)
    said = f"stopped by {name} before the first step: nothing was saved; start the same command again\n"
    assert (done.returncode, done.stderr) == (code, said if code == REQUEUE else "")


def test_ctrl_c_of_another_command_before_anything_large_is_imported() -> None:
    done = signalled_at_import("data", "SIGINT")
    assert (done.returncode, done.stderr) == (REQUEUE, "unisono: interrupted\n")


@pytest.mark.parametrize("listens", ["unisono.dist.stop_notice.StopNotice()", "unisono.launch.supervise.StopSignals()"])
def test_sigterm_after_a_run_has_listened_claims_nothing(listens: str) -> None:
    """What was installed before comes back after the run, which may have saved."""
    program = (
        f"import os, signal, sys; sys.path[:] = {sys.path!r}\n"
        "import unisono.dist.stop_notice, unisono.launch.supervise\n"
        "from unisono.dist.early_signals import exit_at_stop_signals\n"
        "exit_at_stop_signals()\n"
        f"with {listens}:\n    pass\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (REQUEUE, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0, 0.1, 0.25, 0.6])
def test_a_signal_at_any_time_of_a_start(tmp_path: Path, after_s: float, number: signal.Signals) -> None:
    desk = make_desk(tmp_path / "desk", tmp_path / "cache")
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "unisono", "train", *desk.settings],
        cwd=desk.folder,
        env=desk.child_environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    # SIGINT has Python's own handler before ours
    status, bit = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGTERM - 1)
    while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & bit:  # Python itself is still starting
        assert process.poll() is None
    time.sleep(after_s)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == REQUEUE, said
    assert "before the first step: nothing was saved; start the same command again" in said
    assert list(desk.folder.glob("runs/*/checkpoints/*")) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("launch", [[], ["launch", "--dir=run", "--", sys.executable, "-m", "unisono", "train"]])
def test_a_signal_while_the_python_of_a_rank_still_starts(tmp_path: Path, launch: list[str], name: str) -> None:
    desk = make_desk(tmp_path / "desk", tmp_path / "cache")
    folder = tmp_path / "stops_its_launcher"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, signal, time\n"
        "if 'UNISONO_RANK' in os.environ:\n"
        f"    os.kill(os.getppid(), signal.{name})\n"
        "    time.sleep(1)\n"  # the launcher looks for signals every 0.05 s
    )
    environ = desk.child_environ()
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "unisono", *(launch or ["train"]), *desk.settings],
        cwd=desk.folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == REQUEUE, done.stderr
    assert "before the first step: nothing was saved; start the same command again" in done.stderr


def test_a_rank_of_ours_is_known_by_its_command(tmp_path: Path) -> None:
    python, script = sys.executable, Path(sys.executable).with_name("unisono")
    own = [f"{script} train a.toml", f"{python} -m unisono train", f"{python} -uP -m unisono train --json"]
    others = [
        f"{script} eval",
        f"{script}",
        f"{python}",
        f"{python} train.py -m unisono train",
        f"{python} -cpass -m unisono train",
        f"{python} -m unisono.kvstore.server train",
        f"{tmp_path}/unisono train",
        f"{tmp_path}/python -m unisono train",
        "bash -c unisono train",
    ]
    for name in ("unisono", "python"):  # a wrapper of that name elsewhere
        (tmp_path / name).write_text('#!/bin/sh\nexec "$@"')
        (tmp_path / name).chmod(0o755)
    assert [command for command in [*own, *others] if is_unisono_train(command.split())] == own


def test_only_ranks_of_ours_start_with_signals_blocked(tmp_path: Path) -> None:
    """Another program may never unblock it, and would then end by a kill alone."""
    desk = make_desk(tmp_path / "desk", tmp_path / "cache")
    program = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "launch", f"--dir={tmp_path}/run", "--", sys.executable, "-c", program],
        env=desk.child_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_a_folder_where_no_run_began_is_said(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """A start that was stopped before its first step leaves ``launch.json``, and not the settings that it had."""
    folder = desk.folder / "stopped"
    folder.mkdir()
    (folder / "launch.json").write_text("{}")
    # this setting ends the start, after the warning and before any training
    arguments = ["train", "--set", f"run.dir={folder}", "--set", "run.resume=/nowhere", "--debug"]
    assert desk.here(*arguments).code == 2
    said = [record.getMessage() for record in caplog.records if "no run began there" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(
        f"{folder} has a launch.json and no config.toml: no run began there, so the defaults apply"
    )
    caplog.clear()
    (folder / "launch.json").unlink()
    assert desk.here(*arguments).code == 2
    assert "no run began there" not in caplog.text


@pytest.mark.full
def test_two_processes_without_standard_input(tmp_path: Path) -> None:
    desk = make_desk(tmp_path / "desk", tmp_path / "cache")
    run_dir = tmp_path / "run"
    more = ["--set=launch.num_processes=2", f"--set=run.dir={run_dir}", *desk.settings]
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&-', "bash", sys.executable, "-m", "unisono", "train", *more],
        cwd=desk.folder,
        env=desk.child_environ(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [event["step"] for event in events_of(run_dir) if event["kind"] == "step"][-1] >= 2


def test_what_is_closed_is_opened_as_nothing() -> None:
    program = (
        f"import os, sys; sys.path[:] = {sys.path!r}; os.close(0); os.close(2)\n"
        "from unisono.dist.interpreter import open_standard_descriptors\n"
        "open_standard_descriptors()\n"
        "print([os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 2)], os.open('/dev/zero', os.O_RDONLY) > 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout == f"{[os.devnull] * 2} True\n"


@pytest.mark.full
def test_workers_of_a_loader_in_a_script_whose_standard_input_is_closed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import tiny\n"
        "from unisono.data.loading.loader import Loader\n"
        "from unisono.data.options import LoaderOptions\n"
        "options = LoaderOptions(num_workers=1, worker_kind='process')\n"
        "print(sum(1 for _ in Loader(tiny.RaggedTokens(8), seed=0, global_batch=4, options=options)))\n"
    )
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&-', "bash", sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_ctrl_c_is_said(tmp_path: Path) -> None:
    desk = Desk(tmp_path, tmp_path / "cache")
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; sys.argv = ['unisono', 'plan']\n"
        "from unisono.cli import main\n"
        "import click\n"
        "def stop(**_):\n    raise click.Abort\n"
        "main.cli.main = stop\n"
        "main.entry()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=desk.child_environ(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (REQUEUE, "unisono: interrupted\n")


def test_the_end_of_a_file_is_no_interrupt(tmp_path: Path) -> None:
    """Click makes an Abort of both; a failure that says "run the same command again" would begin again for ever."""
    desk = Desk(tmp_path, tmp_path / "cache")
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; sys.argv = ['unisono', 'completion', 'bash']\n"
        "from unisono.cli import completion, main\n"
        "def fail(**_):\n    raise EOFError('a file that ends early')\n"
        "completion.command.callback = fail\n"
        "main.entry()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=desk.child_environ(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "EOFError: a file that ends early" in done.stderr
    assert "interrupted" not in done.stderr
