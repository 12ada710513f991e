"""Jobs with servers: each process lives, dies and is restarted alone. The servers here are a few lines of socket code."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from launching import start_job
from procs import is_running, wait_until

# answers every connection with its epoch, at the address the launcher holds for it
SERVER = """
import socket
signal.signal(signal.SIGTERM, lambda *_: (seen(name + ".snapshot"), sys.exit(0)))
listener = socket.socket(fileno=job.listen_fd)
assert f"{listener.getsockname()[0]}:{listener.getsockname()[1]}" == job.server_addresses[job.server_index]
seen(name, os.getpid())
while True:
    connection, _ = listener.accept()
    connection.sendall(f"{job.restart_count}".encode())
    connection.close()
"""
ASK = """
import socket
def ask(index):
    host, _, port = job.server_addresses[index].rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        return connection.recv(16).decode()
def until(condition):
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
"""


def test_a_server_that_dies_comes_back_at_its_address_and_no_worker_notices(tmp_path: Path) -> None:
    worker = ASK + 'seen("up", os.getpid()); assert ask(1) == "0"; until(lambda: ask(0) == "1"); seen("done", ask(1))'
    launched = start_job(worker, tmp_path, server=SERVER, servers=2)
    launched.wait_for("up.0.0", "up.1.0", "server-0.0.0")
    os.kill(int((launched.run_dir / "server-0.0.0").read_text()), signal.SIGKILL)
    code, said = launched.finish()
    assert code == 0, said
    assert "attempt 0: server 0 (pid " in said
    assert "was killed by signal 9 (SIGKILL)" in said
    assert "restarting server 0 alone (restart 1 of 3)" in said
    # the other server and both workers are as they were
    assert [(launched.run_dir / f"done.{rank}.0").read_text() for rank in (0, 1)] == ["0", "0"]
    ended = [(each["process"], each["attempt"], each["exit_codes"]) for each in launched.record()["ended"]]
    assert sorted(ended) == [("rank 0", 0, [0]), ("rank 1", 0, [0]), ("server 0", 0, [-9])]
    # servers outlive the workers, and are asked before they are killed
    assert (launched.run_dir / "server-0.snapshot.0.1").exists()
    assert (launched.run_dir / "server-1.snapshot.0.0").exists()


def test_a_worker_that_dies_is_restarted_alone(tmp_path: Path) -> None:
    worker = """
seen("up", os.getpid())
if job.restart_count == 0 and job.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not (run_dir / "up.1.1").exists():
    time.sleep(0.02)
"""
    launched = start_job(worker, tmp_path, server=SERVER, servers=1)
    code, said = launched.finish()
    assert code == 0, said
    assert "restarting rank 1 alone (restart 1 of 3)" in said
    assert not (launched.run_dir / "up.0.1").exists()


def test_a_worker_that_cannot_be_helped_ends_the_job_in_order(tmp_path: Path) -> None:
    worker = """
def stop(*_):
    seen("saved"); sys.exit(75)
signal.signal(signal.SIGTERM, stop)
seen("up")
while not all((run_dir / f"up.{rank}.0").exists() for rank in (0, 1)):
    time.sleep(0.02)
if job.rank == 1:
    print("this must change")
    sys.exit(2)
time.sleep(600)
"""
    launched = start_job(worker, tmp_path, server=SERVER, servers=1)
    code, said = launched.finish()
    assert code == 2, said
    assert "this must change" not in said  # it stands above, as the rank has said it
    assert "rank 1 (pid " in said
    assert "restarting" not in said
    assert (launched.run_dir / "saved.0.0").exists()
    assert (launched.run_dir / "server-0.snapshot.0.0").exists()


def test_a_stop_reaches_workers_first_and_servers_last(tmp_path: Path) -> None:
    worker = 'signal.signal(15, lambda *_: (seen("saved", ask(0)), sys.exit(75))); seen("up"); time.sleep(600)'
    launched = start_job(ASK + worker, tmp_path, server=SERVER, servers=1)
    launched.wait_for("up.0.0", "up.1.0", "server-0.0.0")
    launched.process.send_signal(signal.SIGTERM)
    code, said = launched.finish()
    assert code == 75, said
    assert "SIGTERM: asking 2 workers to save and end within 20 s" in said
    assert (launched.run_dir / "saved.1.0").read_text() == "0"


@pytest.mark.full
@pytest.mark.full
def test_an_error_of_every_worker_of_a_plain_script_is_shown_once(tmp_path: Path) -> None:
    launched = start_job("time.sleep(0.5); raise KeyError('no such column')", tmp_path, server=SERVER, servers=1)
    code, said = launched.finish()
    assert code == 1
    assert said.count("Traceback (most recent call last)") == 1
    assert said.count("would come back, so it is not restarted") == 1
    assert "restarting" not in said
    # a worker that was slower may have been asked to end before its own error
    logs = [log.read_text() for log in (launched.run_dir / "logs").glob("rank-*.log")]
    assert sorted(text.count("KeyError: 'no such column'") for text in logs) in ([0, 1], [1, 1])


def test_the_same_crash_of_one_worker_after_one_restart_is_the_end(tmp_path: Path) -> None:
    worker = """
if job.rank == 1:
    record_failure(Path(os.environ["UNISONO_LOGS"]), job, ValueError("bad sample 7"), step=12)
    sys.exit(1)
time.sleep(600)
"""
    launched = start_job(worker, tmp_path, server=SERVER, servers=1, max_restarts=9)
    code, said = launched.finish()
    assert code == 1, said
    assert "ValueError in step 12 on rank 1, 2 times in a row" in said
    assert said.count("restarting rank 1 alone") == 1


@pytest.mark.full
def test_a_server_that_crashes_each_time_ends_the_job_in_order(tmp_path: Path) -> None:
    worker = 'signal.signal(15, lambda *_: (seen("saved"), sys.exit(75))); seen("up")\nwhile True: time.sleep(0.05)'
    server = """
while not all((run_dir / f"up.{rank}.0").exists() for rank in (0, 1)):
    time.sleep(0.02)
raise ValueError("no such table")
"""
    launched = start_job(worker, tmp_path, server=server, servers=1, max_restarts=2)
    code, said = launched.finish()
    assert code == 1, said
    assert said.count("ValueError: no such table") == 3
    assert said.count("restarting server 0 alone") == 2
    assert "no restart of server 0 left of 2 (launch.max_restarts)" in said
    assert "a process that is given up: asking 2 workers to save and end" in said
    assert [(launched.run_dir / f"saved.{rank}.0").exists() for rank in (0, 1)] == [True, True]
    assert [each["exit_codes"] for each in launched.record()["ended"] if each["process"] == "server 0"] == [[1]] * 3


def test_a_killed_launcher_takes_servers_and_workers_along(tmp_path: Path) -> None:
    launched = start_job('seen("up"); time.sleep(600)', tmp_path, server=SERVER, servers=1)
    launched.wait_for("up.0.0", "up.1.0", "server-0.0.0")
    family = launched.children()
    assert len(family) >= 4
    launched.process.kill()
    launched.process.communicate()
    launched.assert_gone(family)


def test_each_process_gets_the_secret_by_a_pipe_and_nobody_else_sees_it(tmp_path: Path) -> None:
    read = """
assert "UNISONO_SECRET_FILE" not in os.environ
secret = os.fdopen(int(os.environ["UNISONO_SECRET_FD"]), "rb").read()
seen(name + ".secret", secret.hex())
while not (run_dir / "looked").exists():
    time.sleep(0.02)
"""
    launched = start_job(read, tmp_path, server=read, servers=1, environ={"UNISONO_SECRET_FILE": "another"})
    launched.wait_for("worker.secret.0.0", "worker.secret.1.0", "server-0.secret.0.0")
    found = {path.read_text() for path in launched.run_dir.glob("*.secret.*")}
    assert len(found) == 1
    secret = found.pop()
    assert len(secret) == 64
    shown = _readable("cmdline", "environ")
    shown += [path.read_bytes() for path in [launched.run_dir / "launch.json", *(launched.run_dir / "logs").iterdir()]]
    assert len(shown) > 20
    assert not any(secret.encode() in text or bytes.fromhex(secret) in text for text in shown)
    (launched.run_dir / "looked").touch()
    assert launched.finish()[0] == 0


def _readable(*names: str) -> list[bytes]:
    found = []
    for process in Path("/proc").iterdir():
        for name in names if process.name.isdigit() else ():
            with suppress(OSError):
                found.append((process / name).read_bytes())
    return found


def test_a_killed_agent_takes_its_processes_along_and_all_come_back(tmp_path: Path) -> None:
    worker = """
seen("up", os.getpid())
while job.restart_count == 0:
    time.sleep(0.05)
assert ask(0) == "1"
"""
    # a killed agent cannot take its folder away
    launched = start_job(ASK + worker, tmp_path, server=SERVER, servers=1, environ={"TMPDIR": str(tmp_path)})
    launched.wait_for("up.0.0", "up.1.0", "server-0.0.0")
    pids = [int((launched.run_dir / name).read_text()) for name in ("up.0.0", "up.1.0", "server-0.0.0")]
    agents = [
        child
        for child in psutil.Process(launched.process.pid).children()
        if "unisono.launch.host_agent" in child.cmdline()
    ]
    assert len(agents) == 1
    agents[0].kill()
    wait_until(lambda: not any(map(is_running, pids)), "its processes end with it")
    code, said = launched.finish()
    assert code == 0, said
    assert "host this host is lost, with all that ran there: " in said
    assert int((launched.run_dir / "server-0.0.1").read_text()) != pids[2]


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    worker = "signal.signal(2, lambda *_: seen('asked')); seen('up')\nwhile True: time.sleep(0.05)"
    launched = start_job(worker, tmp_path, server=SERVER, servers=1, grace_s=600)
    launched.wait_for("up.0.0", "up.1.0")
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for("asked.0.0", "asked.1.0")
    launched.process.send_signal(signal.SIGINT)
    code, said = launched.finish()
    assert code == 1, said
