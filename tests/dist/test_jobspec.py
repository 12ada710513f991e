"""Every source of a JobSpec, and every contradiction between them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from unisono.dist.jobspec import JobSpec, first_slurm_host, idle_role, job_from_environ
from unisono.errors import LaunchError

OWN = JobSpec(
    run_id="demo",
    restart_count=3,
    rank=1,
    local_rank=1,
    world_size=2,
    local_world=2,
    master_port=4242,
    source="unisono",
    listen_fd=7,
)
TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "991",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_RESTART_COUNT": "1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-1",
}
DMLC = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "2",
    "DMLC_WORKER_ID": "1",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
}


def test_nothing_set_is_one_process() -> None:
    assert job_from_environ({"PATH": "/bin", "MASTER_ADDR": "exported-once"}) == JobSpec()


def test_own_variables_round_trip_and_agree_with_torchs_names() -> None:
    environ = OWN.environ()
    assert job_from_environ(environ) == OWN
    without_own = {name: value for name, value in environ.items() if not name.startswith("UNISONO_")}
    seen_by_torch = job_from_environ(without_own)
    assert (seen_by_torch.rank, seen_by_torch.world_size, seen_by_torch.local_rank) == (1, 2, 1)
    assert seen_by_torch.source == "torchrun"


def test_torchrun() -> None:
    assert job_from_environ(TORCHRUN) == JobSpec(
        run_id="job7",
        restart_count=2,
        rank=5,
        local_rank=1,
        world_size=8,
        local_world=4,
        master_addr="node-a",
        master_port=29500,
        source="torchrun",
        shared_store=True,
    )


@pytest.mark.parametrize("name", ["a" * 64, "a." * 130, "x..y", "host..", "ü" * 80, " "])
def test_a_master_address_that_no_resolver_takes(name: str) -> None:
    with pytest.raises(LaunchError, match="processes meet at the name or IP address of a host"):
        job_from_environ(TORCHRUN | {"MASTER_ADDR": name})


@pytest.mark.parametrize("name", ["node-a.example.", "fe80::1%eth0", "10.0.0.1", "knoten-ä", "a_b"])
def test_names_and_addresses_of_hosts(name: str) -> None:
    assert job_from_environ(TORCHRUN | {"MASTER_ADDR": name}).master_addr == name


def test_slurm_step() -> None:
    job = job_from_environ(SLURM)
    assert (job.run_id, job.restart_count, job.rank, job.world_size) == ("slurm-991.0", 1, 3, 6)
    assert (job.local_rank, job.local_world, job.master_addr, job.source) == (1, 2, "gpu07", "slurm")
    other_rank = job_from_environ(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert other_rank.master_port == job.master_port
    assert 20000 <= job.master_port < 32000
    assert job_from_environ(SLURM | {"MASTER_PORT": "777", "MASTER_ADDR": "10.0.0.1"}).master_port == 777


def test_slurm_batch_and_interactive_shells_are_one_process() -> None:
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    assert job_from_environ(batch).world_size == 1
    assert job_from_environ(SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}).world_size == 1


def test_openmpi_on_one_and_on_several_hosts() -> None:
    job = job_from_environ(OPENMPI)
    assert (job.rank, job.world_size, job.local_world, job.master_addr) == (2, 4, 4, "127.0.0.1")
    assert job.source == "openmpi"
    spread = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    with pytest.raises(LaunchError, match=r"openmpi started ranks on several hosts and does not say where rank 0 is"):
        job_from_environ(spread)
    assert job_from_environ(spread | {"MASTER_ADDR": "h1"}).master_addr == "h1"


def test_mpirun_inside_a_slurm_step_numbers_the_processes() -> None:
    assert job_from_environ(SLURM | OPENMPI).source == "openmpi"


def test_dmlc_worker() -> None:
    job = job_from_environ(DMLC)
    assert (job.rank, job.world_size, job.local_rank, job.master_port, job.source) == (1, 2, 1, 9091, "dmlc")
    assert job.role == "worker"
    # the number the trackers give, in whichever variable
    for name in ("DMLC_RANK", "DMLC_TASK_ID"):
        other = {key: value for key, value in DMLC.items() if key != "DMLC_WORKER_ID"} | {name: "1"}
        assert job_from_environ(other) == job
    there = job_from_environ(DMLC | {"DMLC_INTERFACE": "ib0"})
    assert there.interface == "ib0"


def test_dmlc_worker_without_a_number() -> None:
    unnumbered = {name: value for name, value in DMLC.items() if name != "DMLC_WORKER_ID"}
    with pytest.raises(LaunchError) as caught:
        job_from_environ(unnumbered)
    text = str(caught.value)
    assert "DMLC_ROLE='worker' and none of DMLC_RANK, DMLC_WORKER_ID, DMLC_TASK_ID" in text
    assert "try:  DMLC_WORKER_ID=0 … 1, one for each worker" in text


def test_dmlc_without_a_meeting_place() -> None:
    for address in ("", "  "):
        with pytest.raises(LaunchError, match="processes meet at the name or IP address of a host"):
            job_from_environ(DMLC | {"DMLC_PS_ROOT_URI": address})


def test_dmlc_servers_and_scheduler() -> None:
    # as MXNet's local tracker starts them: tasks are numbered in one row, workers first
    task = {name: value for name, value in DMLC.items() if name != "DMLC_WORKER_ID"} | {"DMLC_NUM_SERVER": "2"}
    server = job_from_environ(task | {"DMLC_ROLE": "server", "DMLC_TASK_ID": "3"})
    assert (server.role, server.server_index, server.servers, server.rank, server.world_size) == ("server", 1, 2, 0, 2)
    scheduler = job_from_environ(task | {"DMLC_ROLE": "scheduler"})
    assert (scheduler.role, scheduler.server_index, scheduler.servers) == ("scheduler", None, 2)
    with pytest.raises(LaunchError, match=r"DMLC_ROLE='boss'\n  rule: a process is one of worker, server, scheduler"):
        job_from_environ(DMLC | {"DMLC_ROLE": "boss"})
    with pytest.raises(LaunchError, match=r"dmlc gives server 2 of 2\n  rule: 0 <= server index < servers"):
        job_from_environ(task | {"DMLC_ROLE": "server", "DMLC_TASK_ID": "4"})


def test_who_has_nothing_to_do() -> None:
    server, scheduler = JobSpec(role="server", servers=1), JobSpec(role="scheduler")
    assert idle_role(JobSpec(), "dist_sync") is None
    assert idle_role(server, "dist_async") == (
        "dist_async: the workers start servers on their own hosts; this server exits"
    )
    assert idle_role(server, "dist_sync") == (
        "dist_sync needs no servers: gradients are all-reduced among the workers; this process exits"
    )
    assert idle_role(scheduler, "dist_sync") is None  # it keeps the store


def test_own_servers_round_trip_and_have_no_rank_of_torchs() -> None:
    server = replace(
        OWN, rank=0, local_rank=0, role="server", servers=2, server_addresses=("a:1", "b:2"), server_index=1
    )
    assert job_from_environ(server.environ()) == server
    assert "RANK" not in server.environ()
    worker = replace(OWN, servers=2, server_addresses=("a:1", "b:2"))
    assert job_from_environ(worker.environ()) == worker
    with pytest.raises(LaunchError, match=r"unisono gives 2 server addresses for 3 servers"):
        job_from_environ(worker.environ() | {"UNISONO_SERVERS": "3"})
    with pytest.raises(LaunchError, match=r"unisono says a server, dmlc says rank 1 of 2"):
        job_from_environ(server.environ() | DMLC)


def test_a_worker_of_servers_may_come_on_top_of_the_world() -> None:
    joins = replace(OWN, rank=2, servers=1, server_addresses=("a:1",))
    environ = {name: value for name, value in joins.environ().items() if name.startswith("UNISONO_")}
    assert job_from_environ(environ) == joins
    with pytest.raises(LaunchError, match="unisono gives rank 2 of world 2"):
        job_from_environ(environ | {"UNISONO_SERVERS": "0", "UNISONO_SERVER_ADDRESSES": ""})


def test_two_launchers_that_disagree_are_both_named() -> None:
    with pytest.raises(LaunchError) as caught:
        job_from_environ(OWN.environ() | {"RANK": "0"})
    assert "unisono says rank 1 of 2, torchrun says rank 0 of 2" in str(caught.value)
    with pytest.raises(LaunchError, match=r"torchrun says rank 5 of 8, dmlc says rank 1 of 2"):
        job_from_environ(TORCHRUN | DMLC)


def test_torchrun_inside_an_allocation_is_no_contradiction() -> None:
    # one torchrun on each of two hosts, four processes each
    in_slurm = TORCHRUN | SLURM | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert job_from_environ(in_slurm).source == "torchrun"
    assert job_from_environ(in_slurm).rank == 5


def test_a_leftover_world_of_one_inside_many_tasks_is_refused() -> None:
    leftover = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(LaunchError) as caught:
        job_from_environ(leftover | SLURM)
    text = str(caught.value)
    assert "torchrun says rank 0 of 1, slurm says rank 3 of 6" in text
    assert "guessing would start several runs in one folder, so nothing was started" in text


def test_half_set_sources_name_what_is_missing() -> None:
    with pytest.raises(LaunchError, match=r"RANK=5, MASTER_ADDR=a, MASTER_PORT=29500 but not WORLD_SIZE, LOCAL_RANK"):
        job_from_environ({"RANK": "5", "MASTER_PORT": "29500", "MASTER_ADDR": "a"})
    with pytest.raises(LaunchError, match=r"but not UNISONO_RESTART_COUNT, UNISONO_LOCAL_RANK"):
        job_from_environ({"UNISONO_RANK": "0", "UNISONO_RUN_ID": "x"})
    with pytest.raises(LaunchError, match=r"slurm set SLURM_PROCID=3, .* but not SLURM_STEP_ID"):
        job_from_environ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": "x"}, r"RANK='x'\n  rule: it is a whole number, 0 or more"),
        ({"RANK": "-1"}, r"RANK='-1'"),
        ({"RANK": "8"}, r"torchrun gives rank 8 of world 8\n  rule: 0 <= rank < world"),
        ({"LOCAL_RANK": "4"}, r"torchrun gives local rank 4 of 4 on this host"),
        ({"MASTER_PORT": "70000"}, r"torchrun gives port 70000\n  rule: a port is at most 65535"),
    ],
)
def test_impossible_places(change: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        job_from_environ(TORCHRUN | change)


def test_all_impossible_values_are_reported_at_once() -> None:
    with pytest.raises(LaunchError, match=r"^2 problems"):
        job_from_environ(TORCHRUN | {"RANK": "9", "MASTER_PORT": "70000"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07-09,12],big1", "gpu07"), ("n1,n2", "n1"), ("a-[3]-ib,b", "a-3-ib"), ("", None), (None, None)],
)
def test_first_host_of_a_slurm_list(nodes: str | None, first: str | None) -> None:
    assert first_slurm_host(nodes) == first


def test_no_torch_is_imported() -> None:
    code = "import sys, unisono.dist, unisono.launch; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)
