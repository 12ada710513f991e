"""Workers leave and join an asynchronous job that ``unisono launch`` started: real servers, real kills."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from procs import wait_until

pytestmark = pytest.mark.timeout(120)

# pushes zeros until it is told to stop, then a one
WORKER = """
import os, sys, time, torch
from pathlib import Path
from unisono.kvstore import create_kvstore
store = create_kvstore("dist_async")
store.set_optimizer("sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
store.init({"w": torch.zeros(1)})
Path(f"up.{store.rank}.new").write_text(str(os.getpid()))
Path(f"up.{store.rank}.new").rename(f"up.{store.rank}")
stop = Path("stop.joined" if store.rank >= store.num_workers else "stop")
while not stop.exists():
    store.push("w", torch.zeros(1)).wait()
    time.sleep(0.02)
store.push("w", torch.ones(1)).wait()
print(f"worker {store.rank} of {store.num_workers} leaves {store.pull('w').wait().item():g}", flush=True)
store.close()
"""


class Launches:
    """The launches of a test, in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, list[subprocess.Popen[str]]()
        (folder / "worker.py").write_text(WORKER)

    def start(self, *options: str, command: str = "worker.py") -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "unisono", "launch", *options, "--", sys.executable, command]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.running.append(subprocess.Popen(argv, cwd=self.folder, env=environ, text=True, **pipes))
        return self.running[-1]

    def wait_for(self, *ranks: int) -> list[int]:
        """The pids of these workers, once they are connected."""
        files = [self.folder / f"up.{rank}" for rank in ranks]
        wait_until(lambda: all(file.exists() for file in files), f"workers {ranks} are there", 60)
        return [int(file.read_text()) for file in files]

    def end(self, launch: subprocess.Popen[str]) -> tuple[int, str]:
        said, _ = launch.communicate(timeout=60)
        return launch.returncode, said


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    there = Launches(tmp_path)
    yield there
    for launch in there.running:
        launch.kill()  # its processes end with it
        launch.communicate()


@pytest.mark.full
def test_a_killed_worker_leaves_the_job_and_another_joins_it(launches: Launches) -> None:
    folder = launches.folder
    job = launches.start("-n", "2", "--servers", "1", "--elastic", "--max-restarts", "0", "--dir", "job")
    os.kill(launches.wait_for(0, 1)[1], signal.SIGKILL)
    assert stat.S_IMODE((folder / "job/secret").stat().st_mode) == 0o600
    joining = launches.start("--join", "job", "--dir", "joined")
    launches.wait_for(2)
    (folder / "stop").touch()
    # the job's own workers have ended: its server stays for the one that has joined
    wait_until(lambda: "rank 0" in (folder / "job/launch.json").read_text(), "rank 0 has ended", 60)
    assert job.poll() is None
    (folder / "stop.joined").touch()
    code, said = launches.end(joining)
    assert (code, "[rank 2] worker 2 of 2 leaves -2" in said) == (0, True), said
    code, said = launches.end(job)
    assert code == 0, said
    assert "rank 1 has left; 1 workers of this launch go on" in said
    assert "[rank 0] worker 0 of 2 leaves -1" in said
    assert not (folder / "job/secret").exists()
    assert not (folder / "job/join.json").exists()


@pytest.mark.full
def test_several_join_from_a_copy_and_are_killed_and_restarted(launches: Launches) -> None:
    folder = launches.folder
    job = launches.start("--servers", "2", "--elastic", "--dir", "job")
    launches.wait_for(0)
    first = launches.start("--join", "job", "-n", "2", "--dir", "first")
    pids = launches.wait_for(1, 2)
    (folder / "copy").mkdir()
    for name in ("join.json", "secret"):
        (folder / "copy" / name).write_bytes((folder / "job" / name).read_bytes())
        (folder / "copy" / name).chmod(0o600)
    second = launches.start("--join", "copy", "--first-rank", "7", "--dir", "second")
    launches.wait_for(7)
    (folder / "up.2").unlink()
    os.kill(pids[1], signal.SIGKILL)
    launches.wait_for(2)
    for name in ("stop", "stop.joined"):
        (folder / name).touch()
    ended = [launches.end(launch) for launch in (first, second, job)]
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert "restarting rank 2 alone (restart 1 of 3)" in ended[0][1]


@pytest.mark.full
def test_a_job_that_all_workers_have_left_has_failed(launches: Launches) -> None:
    job = launches.start("--servers", "1", "--elastic", "--max-restarts", "0", "--dir", "job")
    os.kill(launches.wait_for(0)[0], signal.SIGKILL)
    code, said = launches.end(job)
    assert code == 1
    assert "rank 0 has left; 0 workers of this launch go on" in said


@pytest.mark.full
def test_without_the_flag_a_worker_that_is_given_up_ends_the_job(launches: Launches) -> None:
    job = launches.start("-n", "2", "--servers", "1", "--max-restarts", "0", "--dir", "job")
    pids = launches.wait_for(0, 1)
    assert not (launches.folder / "job/secret").exists()
    os.kill(pids[1], signal.SIGKILL)
    code, said = launches.end(job)
    assert code == 1
    assert "a process that is given up: asking 1 workers to save and end" in said


@pytest.mark.full
def test_a_stop_of_the_job_waits_for_nobody_who_joined(launches: Launches) -> None:
    job = launches.start("--servers", "1", "--elastic", "--dir", "job")
    launches.wait_for(0)
    joining = launches.start("--join", "job", "--dir", "joined", "--max-restarts", "0")
    launches.wait_for(1)
    for _ in range(2):
        job.send_signal(signal.SIGINT)
    assert launches.end(job)[0] == 1
    joining.kill()


def test_a_job_that_does_not_run_cannot_be_joined(tmp_path: Path, launches: Launches) -> None:
    code, said = launches.end(launches.start("--join", "job"))
    assert code == 2
    assert "--join job, whose join.json cannot be read (" in said
    assert "  rule: workers join a job while it runs: unisono launch --servers 1 --elastic" in said
    assert "  so:   nothing was started" in said
    assert "  try:  the folder (--dir) of that launch, or a copy of it" in said
    (tmp_path / "job").mkdir()
    facts = '{"run_id": "r", "world_size": 2, "server_addresses": ["127.0.0.1:1"]}'
    (tmp_path / "job/join.json").write_text(facts)
    code, said = launches.end(launches.start("--join", "job", "--first-rank", "1"))
    assert code == 2
    assert "--first-rank 1 in a job of 2 workers\n  rule: a worker that joins has a rank of its own" in said
