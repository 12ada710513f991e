"""Jobs as MXNet's tracker starts them: one script as scheduler, servers and workers, each a real process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from certificates import Authority

from unisono.dist import JobSpec
from unisono.dist.dmlc import take_role
from unisono.errors import LaunchError
from unisono.kvstore.server import dmlc as server

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import os, signal, sys, torch
from unisono.kvstore import create_kvstore
store = create_kvstore(sys.argv[1])
store.set_optimizer("sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
store.init({3: torch.zeros(2)})
for _ in range(5):
    store.push(3, torch.ones(2)).wait()
store.barrier()
print(f"{store.type} worker {store.rank} of {store.num_workers}: {store.pull(3).wait().tolist()}", flush=True)
store.barrier()
if store.rank in map(int, sys.argv[2:]):
    os.kill(os.getpid(), signal.SIGKILL)
store.close()
"""
JOIN = """
import os, torch
from unisono.dist import job_from_environ, join_world
world = join_world(job_from_environ(os.environ), device_type="cpu", timeout_s=60)
print("sum", world.all_reduce(torch.ones(1)).item(), "on rank", world.rank)
world.close()
"""


def members(workers: int, servers: int) -> list[dict[str, str]]:
    """What tells the processes of a job apart, as dmlc-core's local tracker sets it."""
    return [
        {"DMLC_ROLE": "scheduler"},
        *({"DMLC_ROLE": "worker", "DMLC_TASK_ID": str(task)} for task in range(workers)),
        *({"DMLC_ROLE": "server", "DMLC_TASK_ID": str(workers + task)} for task in range(servers)),
    ]


@contextmanager
def job(
    folder: Path, script: str, *arguments: str, workers: int = 1, servers: int = 1, secret: bool = True
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a job of ``script``: scheduler, workers, servers. None is left afterwards."""
    (folder / "script.py").write_text(script)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
    }
    if secret:
        with open(os.open(folder / "secret", os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.write(bytes(range(32)))
        environ["UNISONO_SECRET_FILE"] = str(folder / "secret")
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "script.py"), *arguments],
            env=environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in members(workers, servers)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_servers_serve_and_all_end_with_the_workers(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT, "dist_async") as processes:
        ended = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], ended
    assert ended[0] == ("", "")
    assert ended[1][0] == "dist_async worker 0 of 1: [-5.0, -5.0]\n"
    assert "server 0 of 1, restart 0, listens at 127.0.0.1:" in ended[2][1]


@pytest.mark.full
def test_two_servers_and_a_worker_that_is_killed_at_its_end(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT, "dist_async", "1", workers=2, servers=2) as processes:
        ended = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [0, 0, -signal.SIGKILL, 0, 0], ended
    assert sorted(out for out, _ in ended[1:3]) == [
        f"dist_async worker {rank} of 2: [-10.0, -10.0]\n" for rank in range(2)
    ]


@pytest.mark.full
@pytest.mark.parametrize(("script", "argument"), [(SCRIPT, "dist_sync"), (JOIN, "")])
def test_no_server_and_no_scheduler_becomes_a_rank(tmp_path: Path, script: str, argument: str) -> None:
    with job(tmp_path, script, argument, workers=2) as processes:
        ended = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, ended
    if argument:
        assert sorted(out for out, _ in ended[1:3]) == [
            f"dist_sync worker {rank} of 2: [-10.0, -10.0]\n" for rank in range(2)
        ]
        assert ended[3][0].startswith("dist_sync needs no servers: gradients are all-reduced among the workers")
    else:
        assert sorted(out for out, _ in ended[1:3]) == ["sum 2.0 on rank 0\n", "sum 2.0 on rank 1\n"]


TRAINER = """
import torch
from unisono import PlanOptions, TrainOptions, Trainer
samples = [(torch.randn(4), torch.zeros(1)) for _ in range(16)]
with Trainer(
    torch.nn.Linear(4, 1), samples, PlanOptions(device="cpu", global_batch=4), objective=torch.nn.MSELoss(),
    options=TrainOptions(steps=2), run_dir="run",
) as trainer:
    result = trainer.fit()
    print("rank", trainer.world.rank, "of", trainer.world.world_size, result.reason, result.step)
"""


@pytest.mark.full
def test_a_trainer_in_every_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with job(tmp_path, TRAINER, workers=2) as processes:
        ended = [process.communicate(timeout=90) for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, ended
    for rank in range(2):
        assert f"rank {rank} of 2 finished 2" in ended[1 + rank][0]
    assert (ended[0][0], ended[3][0]) == ("", "")


def test_without_a_secret_servers_and_workers_are_refused(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT, "dist_async", secret=False) as (scheduler, worker, server):
        for process, role in ((worker, "worker"), (server, "server")):
            _, said = process.communicate(timeout=60)
            assert process.returncode == 1
            assert (
                f"a {role} of MXNet's tracker, and neither UNISONO_SECRET_FILE nor UNISONO_TLS\n  rule: servers" in said
            )
            assert "  so:   anyone who reaches the port could change the parameters, so nothing was started" in said
            assert "  try:  on every host: umask 077; head -c 32 /dev/urandom > secret" in said
        assert scheduler.wait(30) == 0  # its worker has come and left


@pytest.mark.full
def test_certificates_alone_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # its secret is the user's own
    folder = Authority(tmp_path / "jobs").host("here")
    monkeypatch.setenv("UNISONO_TLS", str(folder))
    with job(tmp_path, SCRIPT, "dist_async", secret=False) as processes:
        ended = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], ended
    assert " under TLS" in ended[2][1]


@pytest.mark.full
def test_servers_end_with_a_scheduler_that_is_killed(tmp_path: Path) -> None:
    with job(tmp_path, SCRIPT + "import time; time.sleep(600)", "dist_async") as (scheduler, worker, server):
        assert worker.stdout is not None
        assert worker.stdout.readline().startswith("dist_async worker 0")
        scheduler.kill()
        time.sleep(1.0)
        assert server.poll() is None or server.returncode == 0
        worker.kill()
        assert server.wait(30) == 0


@pytest.mark.parametrize("role", ["server", "worker"])
@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("UNISONO_SECRET_FILE", "none", "ENOENT, No such file or directory"),
        ("UNISONO_SECRET_FILE", ".", "it is something else"),
        ("UNISONO_SECRET_FILE", "/dev/zero", "it is something else"),
        ("UNISONO_SECRET_FILE", "short", "it holds 3 bytes"),
        ("UNISONO_TLS", "short", "it is something else"),
        ("UNISONO_TLS", "none", "ENOENT, No such file or directory"),
    ],
)
def test_bad_credentials_are_found_before_the_scheduler_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, name: str, value: str, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_bytes(b"abc")
    for other in ("UNISONO_SECRET_FILE", "UNISONO_SECRET_FD", "UNISONO_TLS"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    # a port that nobody listens at: waiting for its scheduler would take two minutes
    spec = JobSpec(source="dmlc", role=role, servers=1, world_size=1, master_addr="127.0.0.1", master_port=1)
    began_s = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        take_role(spec)
    assert time.monotonic() - began_s < 5
    (problem,) = caught.value.problems
    assert problem.given == f"{name}={value}: {fault}"
    assert problem.consequence.endswith("so nothing was started")


def test_a_server_with_an_impossible_host_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(bytes(32))
    monkeypatch.setenv("UNISONO_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("DMLC_NODE_HOST", "300.1.1.1")
    spec = JobSpec(source="dmlc", role="server", servers=1, world_size=1, master_addr="127.0.0.1", master_port=1)
    with pytest.raises(LaunchError) as caught:
        server._serve(spec)
    (problem,) = caught.value.problems
    assert problem.given.startswith("'300.1.1.1' is no address that is known here: ")
    assert problem.rule == "a server listens at the name or IP address of one interface of this machine"


FIND_SCHEDULER = """
import contextlib, os, socket, sys, time
if os.environ["DMLC_ROLE"] == "worker":
    # a stranger, before the first worker: as a worker that comes and goes, and as many that say nothing
    address = ("127.0.0.1", int(os.environ["DMLC_PS_ROOT_PORT"]))
    held = []
    while len(held) < 500:
        with contextlib.suppress(ConnectionError):
            held.append(socket.create_connection(address))
    held[0].sendall(b"worker 0\\nbye\\n")
"""


@pytest.mark.full
def test_strangers_do_not_end_a_scheduler_and_its_servers(tmp_path: Path) -> None:
    with job(tmp_path, FIND_SCHEDULER + SCRIPT, "dist_async") as processes:
        ended = [process.communicate(timeout=100) for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], ended
    assert ended[1][0] == "dist_async worker 0 of 1: [-5.0, -5.0]\n"
