"""Jobs over a real ssh server that plays two hosts: how they start, meet, end, and what is left when things are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import start_argv, start_job
from procs import command_lines, marked, wait_until
from sshd import Sshd, serve

ALL_REDUCE = """
import os, torch
from unisono.dist import job_from_environ, join_world
job = job_from_environ(os.environ)
world = join_world(job, device_type="cpu", timeout_s=60)
total = world.all_reduce(torch.tensor([float(job.rank + 1)])).item()
place = f"{job.rank}.{job.local_rank}.{job.local_world} on {os.environ['GLOO_SOCKET_IFNAME']}"
print(f"rank {place}: sum {total} at {job.master_addr}", os.environ["CHOSEN"], os.environ.get("LEFT_HERE"), flush=True)
world.close()
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with serve(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def test_two_hosts_of_two_ranks_add_up(sshd: Sshd, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"# two hosts\n127.0.0.1 slots=2\n127.0.0.2:{sshd.port} slots=2 max_slots=4\n")
    (tmp_path / "train.py").write_text(ALL_REDUCE)
    argv = [sys.executable, "-m", "unisono", "launch", "--hostfile", str(hostfile), "--ssh-port", str(sshd.port)]
    argv += ["--env", 'CHOSEN=it\'s $HOME; "x"\n`y`', "--env", "MARK", "--dir", str(tmp_path / "run")]
    mark = uuid.uuid4().hex
    environ = sshd.environ | {"LEFT_HERE": "not forwarded", "MY_TOKEN": "canary-of-a-token"}
    before = len(sshd.arguments)
    launched = start_argv([*argv, "--", sys.executable, str(tmp_path / "train.py")], tmp_path / "run", mark, environ)
    out, said = launched.process.communicate(timeout=120)
    assert launched.process.returncode == 0, said
    assert "launch: 127.0.0.2: Hello\\x1b[2Jcome back\n" in said
    for rank, host in enumerate(("127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2")):
        line = f'rank {rank}.{rank % 2}.2 on lo: sum 10.0 at 127.0.0.1 it\'s $HOME; "x"\n'
        assert f"[rank {rank} {host}] {line}[rank {rank} {host}] `y` None\n" in _of(out, rank)
        assert (tmp_path / "run" / "logs" / f"rank-{rank}.attempt-0.log").read_text().startswith(line)
    record = launched.record()
    assert set(record["hosts"]) == {"127.0.0.1", "127.0.0.2"}
    assert record["hosts"]["127.0.0.2"]["interface_why"] == "the way from here to 127.0.0.1 leads over it"
    assert record["attempts"][0]["exit_codes"] == [0, 0, 0, 0]
    # what ssh was given: no name or value of any variable, the host after --, key checking as the user has it
    given = sshd.arguments[before:]
    assert [each[each.index("--") + 1 :] for each in sorted(given)] == [
        [host, "exec /bin/sh -s"] for host in ("127.0.0.1", "127.0.0.2")
    ]
    assert not any(
        word in " ".join(map(" ".join, given)) for word in ("StrictHostKeyChecking", "CHOSEN", "PATH", "MARK")
    )
    launched.assert_gone([launched.process.pid])


WILD = r"""
sys.stdout.buffer.write(b"\x1b[31mred\x1b[0m \x1b]0;title\x07\x9b2Jgone \xe2\x80\xae\xff\n 10%\r 20%\rdone\r\n\ttab\n")
sys.stdout.flush()
if job.rank == 1:
    os.write(2, b"\x1b[2Jfrom standard error\n")
    try:
        raise ValueError("bad \x1b[8msample")
    except ValueError as error:
        record_failure(Path(os.environ["UNISONO_LOGS"]), job, error, step=12)
    sys.exit(1)
"""


def test_what_another_host_prints_cannot_drive_this_terminal(sshd: Sshd, tmp_path: Path) -> None:
    launched = start_job(WILD, tmp_path, hosts=sshd.hosts(1), environ=sshd.environ, max_restarts=0)
    out, said = launched.process.communicate(timeout=60)
    assert launched.process.returncode == 1
    for name in ("rank 0 127.0.0.1", "rank 1 127.0.0.2"):
        lines = [line.partition("] ")[2] for line in out.splitlines() if line.startswith(f"[{name}] ")]
        assert lines[:3] == ["\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07\ufffd2Jgone \\u202e\ufffd", "done", " tab"]
    assert r"[rank 1 127.0.0.2] \x1b[2Jfrom standard error" in out.splitlines()
    assert r"launch: ValueError: bad \x1b[8msample" in said.splitlines()
    assert r"launch: 127.0.0.1: Hello\x1b[2Jcome back" in said.splitlines()
    assert r"launch: 127.0.0.1: \x1b[8ma complaint" in said.splitlines()
    assert not [char for char in out + said if char != "\n" and not char.isprintable()]
    # the log has it as it came, but for bytes that are no text
    log = launched.run_dir / "logs" / "rank-1.attempt-0.log"
    assert log.read_bytes().startswith(b"\x1b[31mred\x1b[0m \x1b]0;title\x07")
    launched.assert_gone([launched.process.pid])


def _of(out: str, rank: int) -> str:
    return "".join(line for line in out.splitlines(keepends=True) if line.startswith(f"[rank {rank} "))


def test_a_rank_killed_over_there_is_named_with_its_host(sshd: Sshd, tmp_path: Path) -> None:
    worker = 'seen("up", os.getpid()); time.sleep(600)'
    launched = start_job(worker, tmp_path, hosts=sshd.hosts(1), environ=sshd.environ, max_restarts=0)
    launched.wait_for("up.0.0", "up.1.0")
    os.kill(int((launched.run_dir / "up.1.0").read_text()), signal.SIGKILL)
    code, said = launched.finish()
    assert code == 1
    assert "attempt 0: rank 1 127.0.0.2 (pid " in said
    assert (
        "was killed by signal 9 (SIGKILL), which this launcher did not send; out of memory is the usual reason" in said
    )
    assert "no restart left of 0" in said


@pytest.mark.full
def test_a_crash_over_there_shows_its_traceback_and_restarts_all(sshd: Sshd, tmp_path: Path) -> None:
    worker = """
seen("port", job.master_port)
if job.rank == 1 and job.restart_count == 0:
    try:
        raise ValueError("bad sample 7")
    except ValueError as error:
        record_failure(Path(os.environ["UNISONO_LOGS"]), job, error, step=12)
    sys.exit(1)
if job.restart_count == 0:
    time.sleep(600)
"""
    launched = start_job(worker, tmp_path, hosts=sshd.hosts(1), environ=sshd.environ)
    code, said = launched.finish()
    assert code == 0, said
    assert "it failed in step 12:" in said
    assert "ValueError: bad sample 7" in said
    assert "restarting all ranks as attempt 1 (restart 1 of 3)" in said
    first, second = launched.record()["attempts"]
    assert (first["root_rank"], first["failure"], second["exit_codes"]) == (1, "ValueError: bad sample 7", [0, 0])
    # both hosts agree on the new attempt's rendezvous point
    assert len({(launched.run_dir / f"port.{rank}.1").read_text() for rank in (0, 1)}) == 1


@pytest.mark.full
def test_an_error_of_every_rank_of_a_plain_script_is_shown_once_and_is_in_each_log(sshd: Sshd, tmp_path: Path) -> None:
    launched = start_job("raise KeyError('no such column')", tmp_path, hosts=sshd.hosts(2), environ=sshd.environ)
    code, said = launched.finish()
    assert code == 1
    assert said.count("Traceback (most recent call last)") == 1
    assert ": the same error (tracebacks in " in said
    assert "an error of the program in its first 60 s would come back, so it is not restarted" in said
    assert len(launched.record()["attempts"]) == 1
    logs = [log.read_text() for log in (launched.run_dir / "logs").glob("rank-*.log")]
    assert len(logs) == 4
    assert all(text.count("KeyError: 'no such column'") == 1 for text in logs)


@pytest.mark.full
def test_the_same_crash_over_there_after_one_restart_is_the_end(sshd: Sshd, tmp_path: Path) -> None:
    worker = """
if job.rank == 1:
    record_failure(Path(os.environ["UNISONO_LOGS"]), job, ValueError("bad sample 7"), step=12)
    sys.exit(1)
time.sleep(600)
"""
    code, said = start_job(worker, tmp_path, hosts=sshd.hosts(1), environ=sshd.environ, max_restarts=9).finish()
    assert code == 1
    assert "ValueError in step 12 on rank 1, 2 times in a row" in said
    assert said.count("restarting all ranks") == 1


@pytest.mark.full
def test_a_stop_reaches_all_hosts_and_the_requeue_code_comes_back(sshd: Sshd, tmp_path: Path) -> None:
    worker = 'signal.signal(15, lambda *_: (seen("saved"), sys.exit(75))); seen("up"); time.sleep(600)'
    launched = start_job(worker, tmp_path, hosts=sshd.hosts(1), environ=sshd.environ)
    launched.wait_for("up.0.0", "up.1.0")
    launched.process.send_signal(signal.SIGTERM)
    code, said = launched.finish()
    assert code == 75, said
    assert (launched.run_dir / "saved.1.0").exists()


def test_a_killed_launcher_leaves_nothing_on_the_other_side(sshd: Sshd, tmp_path: Path) -> None:
    worker = """
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
seen("up"); time.sleep(600)
"""
    launched = start_job(worker, tmp_path, hosts=sshd.hosts(1), environ=sshd.environ)
    launched.wait_for("up.0.0", "up.1.0")
    family = launched.children()
    # the launcher and its guard-less ssh here; agents, ranks and their children there
    assert len(marked(launched.mark)) >= 7
    launched.process.kill()
    launched.process.communicate()
    launched.assert_gone(family)


@pytest.mark.full
def test_a_host_that_goes_away_is_said_and_comes_back_for_the_next_attempt(sshd: Sshd, tmp_path: Path) -> None:
    launched = start_job(
        'seen("up"); time.sleep(0 if job.restart_count else 600)', tmp_path, hosts=sshd.hosts(1), environ=sshd.environ
    )
    launched.wait_for("up.0.0", "up.1.0")
    lines = [child for child in psutil.Process(launched.process.pid).children() if "127.0.0.2" in child.cmdline()]
    assert len(lines) == 1
    lines[0].kill()
    code, said = launched.finish()
    assert code == 0, said
    assert "host 127.0.0.2 is lost, with all that ran there: ssh ended with exit code -9" in said
    assert (launched.run_dir / "up.1.1").exists()


@pytest.mark.full
def test_servers_on_a_host_of_their_own(sshd: Sshd, tmp_path: Path) -> None:
    hosts = [sshd.hosts(2)[0], sshd.hosts(1)[1] | {"role": "server"}]
    server = """
import socket
connection, _ = socket.socket(fileno=job.listen_fd).accept()
connection.sendall(os.fdopen(int(os.environ["UNISONO_SECRET_FD"]), "rb").read())
connection.close()
time.sleep(600)
"""
    worker = """
import socket
secret = os.fdopen(int(os.environ["UNISONO_SECRET_FD"]), "rb").read()
host, _, port = job.server_addresses[job.rank].rpartition(":")
with socket.create_connection((host, int(port)), 20) as connection:
    assert connection.recv(64) == secret
seen("host", host)
seen("secret", secret.hex())
while not (run_dir / "looked").exists():
    time.sleep(0.02)
"""
    launched = start_job(worker, tmp_path, hosts=hosts, server=server, servers=2, environ=sshd.environ, grace_s=0.5)
    launched.wait_for("secret.0.0", "secret.1.0")
    secret = (launched.run_dir / "secret.0.0").read_text()
    lines = command_lines()
    (launched.run_dir / "looked").touch()
    code, said = launched.finish()
    assert code == 0, said
    assert (launched.run_dir / "host.0.0").read_text() == "127.0.0.2"
    assert secret not in lines
    assert secret not in json.dumps(sshd.arguments)


@pytest.mark.full
def test_a_port_that_is_taken_is_named_with_its_host(sshd: Sshd, tmp_path: Path) -> None:
    launched = start_job("", tmp_path, hosts=sshd.hosts(1), environ=sshd.environ, port=sshd.port)
    code, said = launched.finish()
    assert code == 2
    assert f"cannot listen at 127.0.0.1:{sshd.port} (Address already in use" in said
    assert "try:  --port with another number, or without it any free one" in said


def test_a_host_that_does_not_let_us_in(sshd: Sshd, tmp_path: Path) -> None:
    # localhost is not among the known hosts, and nobody is asked whether it should be
    hosts = [sshd.hosts(1)[0] | {"name": "localhost"}]
    code, said = start_job("", tmp_path, hosts=hosts, environ=sshd.environ).finish()
    assert code == 2
    assert "Host key verification failed" in said
    assert "localhost has no agent of this launch over ssh: ssh ended with exit code 255" in said
    assert "so:   nothing is running" in said


def test_a_command_that_is_not_there(sshd: Sshd, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"127.0.0.2 port={sshd.port}\n")
    argv = [sys.executable, "-m", "unisono", "launch", "--hostfile", str(hostfile), "--dir", str(tmp_path / "run")]
    ended = subprocess.run(
        [*argv, "--", "no-such-program"], env=os.environ | sshd.environ, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "127.0.0.2: 'no-such-program' cannot be started (No such file or directory)" in ended.stderr


@pytest.mark.full
def test_a_run_that_went_well_leaves_no_folder_of_the_agent(sshd: Sshd, tmp_path: Path) -> None:
    launched = start_job(
        'seen("logs", os.environ["UNISONO_LOGS"])', tmp_path, hosts=sshd.hosts(1), environ=sshd.environ
    )
    assert launched.finish()[0] == 0
    folder = Path((launched.run_dir / "logs.0.0").read_text())
    assert folder.name.startswith("unisono-agent-")
    wait_until(lambda: not folder.exists(), "the agent has taken its folder away")
