"""The collectives, what goes wrong with them, and what is left after them. Real processes on gloo."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import WorkersFailed
from procs import listening, wait_until

from unisono.dist import JobSpec, World, agree, join_world, on_first_rank
from unisono.dist.progress import num_heartbeats
from unisono.dist.rendezvous import open_store, serve_store
from unisono.errors import CommError, DataError, LaunchError


def texts(error: CommError) -> str:
    """The problem as the user reads it, which must have all four parts."""
    assert all((part.given and part.rule and part.consequence and part.nearest) for part in error.problems)
    return str(error)


# --- it works --------------------------------------------------------------------------------------------------------


def every_operation(world: World) -> dict[str, Any]:
    mine = torch.tensor([1.0, -2.0]) * (world.rank + 1)
    sent = torch.full((3,), float(world.rank), dtype=torch.bfloat16)
    side = world.with_own_group("side")
    side_sum = side.all_reduce(torch.tensor([world.rank]))
    side.barrier()
    world.barrier()
    side.close()
    return {
        "sum": world.all_reduce(mine.clone()).tolist(),
        "max": world.all_reduce(mine.clone(), "max").tolist(),
        "min": world.all_reduce(mine.clone(), "min").tolist(),
        "broadcast": world.broadcast(sent, src=world.world_size - 1).tolist(),
        "side": side_sum.item(),
        "gathered": world.all_gather_json({"rank": world.rank, "text": "é" * world.rank, "none": None}),
        "told": world.broadcast_json({"from": world.rank, "shape": (2, 3)}, src=world.world_size - 1),
        "group": world.group is not None,
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_operations(pool: Any, ranks: int) -> None:
    scale = ranks * (ranks + 1) / 2
    for result in pool.run(every_operation, ranks=ranks):
        assert result == {
            "sum": [scale, -2 * scale],
            "max": [ranks, -2],
            "min": [1, -2 * ranks],
            "broadcast": [ranks - 1] * 3,
            "side": ranks * (ranks - 1) // 2,
            "gathered": [{"rank": rank, "text": "é" * rank, "none": None} for rank in range(ranks)],
            "told": {"from": ranks - 1, "shape": [2, 3]},
            "group": ranks > 1,
        }


def test_one_process_needs_no_group_and_no_port() -> None:
    before = listening(os.getpid())
    world = join_world(JobSpec(), device_type="cpu", timeout_s=1)
    assert world.group is None
    assert not torch.distributed.is_initialized()
    tensor = torch.ones(2)
    assert world.all_reduce(tensor) is tensor
    assert world.with_own_group("side").all_gather_json((1, 2)) == [[1, 2]]
    assert listening(os.getpid()) == before
    world.close()
    world.close()


def big_json(world: World) -> list[int]:
    return [len(text) for text in world.all_gather_json("x" * (world.rank * 3_000_000))]


def test_json_of_very_unequal_sizes(pool: Any) -> None:
    assert pool.run(big_json, ranks=2) == [[0, 3_000_000]] * 2


def too_big(world: World) -> str:
    try:
        world.all_gather_json("x" * (65 * 2**20))
    except ValueError as error:
        return str(error)
    return "no error"


def told_where_tensors_are_made_elsewhere(world: World) -> list[Any]:
    with torch.device("meta"):
        world.barrier()
        return [world.broadcast_json(world.rank, src=1), *world.all_gather_json(world.rank)]


def test_json_is_of_the_host_whatever_the_default_device(pool: Any) -> None:
    assert pool.run(told_where_tensors_are_made_elsewhere, ranks=2) == [[1, 0, 1]] * 2


def test_json_is_bounded(pool: Any) -> None:
    assert pool.run(too_big, ranks=2) == ["68157442 bytes of JSON; at most 67108864 are exchanged between ranks"] * 2


def two_threads(world: World) -> tuple[float, float]:
    """Collectives of two groups at once, as training and an asynchronous save have it, in no common order."""
    side = world.with_own_group("checkpoint")
    own, other = torch.ones(2), torch.ones(50_000)

    def save() -> None:
        for _ in range(40):
            side.all_reduce(own, "max")
            side.all_gather_json({"rank": world.rank})

    saver = threading.Thread(target=save)
    saver.start()
    for _ in range(60):
        world.all_reduce(other, "max")
    saver.join()
    return own.sum().item(), other.max().item()


def test_a_group_of_its_own_keeps_saves_and_training_apart(pool: Any) -> None:
    assert pool.run(two_threads, ranks=2) == [(2.0, 1.0)] * 2


# --- what it opens, and what it leaves -------------------------------------------------------------------------------


def open_files() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{fd.name} {os.readlink(fd)}")
        except OSError:
            continue
    return found


def footprint(job: JobSpec) -> dict[str, Any]:
    """Listeners while two groups are open, then threads, files and environment before and after them."""
    # the first group of a process starts things of torch's own that stay, such as the pipe of its event loop
    join_and_leave(replace(job, run_id="warm-up", listen_fd=os.dup(job.listen_fd) if job.listen_fd else None))
    files, threads = open_files(), native_threads()
    # torch's caches keep one mesh of a test before; the socket that rank 0 was given is this job's
    earlier = {where for where in listening(os.getpid()) if not where.endswith(f":{job.master_port:04X}")}
    interfaces: list[str | None] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("init_process_group", "new_group"):
            patch.setattr(torch.distributed, name, noting_interface(interfaces, getattr(torch.distributed, name)))
        world = join_world(job, device_type="cpu", timeout_s=20)
        side = world.with_own_group("side")
    side.barrier()
    listeners = listening(os.getpid())
    world.barrier()
    world.close()
    side.close()
    wait_until(lambda: native_threads() == threads, "the threads of the groups are gone")
    return {
        "listeners": [each for each in listeners if each not in earlier],
        "listening_after": [each for each in listening(os.getpid()) if each not in earlier],
        "files": sorted(open_files() - files),
        "python_threads": threading.active_count(),
        "interfaces": [*interfaces, os.environ.get("GLOO_SOCKET_IFNAME")],
    }


def noting_interface(seen: list[str | None], function: Callable[..., Any]) -> Callable[..., Any]:
    """A host whose name resolves to loopback would hide that gloo goes by the host's name, so look at what it is told."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        return function(*args, **kwargs)

    return noting


def join_and_leave(job: JobSpec) -> None:
    world = join_world(job, device_type="cpu", timeout_s=20)
    world.barrier()
    world.close()


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_only_loopback_listens_and_nothing_stays(pool: Any) -> None:
    for rank, seen in enumerate(pool.run(footprint, ranks=2, joined=False)):
        loopback = [where for where in seen["listeners"] if where.startswith("0100007F:")]
        assert seen["listeners"] == loopback, "a listener on another interface than 127.0.0.1"
        # gloo's two groups, and the store on rank 0
        assert len(loopback) == (3 if rank == 0 else 2)
        # the listening socket given to rank 0 of the first rendezvous is spent with the second one
        assert seen["listening_after"] == []
        assert seen["files"] == []
        assert seen["python_threads"] == 1
        assert seen["interfaces"] == ["lo", "lo", None]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def peer_killed(world: World, folder: str) -> None:
    """The killed rank fails the call as a whole, so the survivor's words come back through a file."""
    pid = world.all_gather_json(os.getpid())[1]
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as caught:
        world.all_reduce(torch.ones(1000))
    (Path(folder) / "words").write_text(texts(caught.value).replace(f"(pid {pid})", "(its pid)"))


def test_a_dead_peer_is_named(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed) as caught:
        pool.run(peer_killed, str(tmp_path), ranks=2)
    assert caught.value.outcomes == ["ok", "exit code -9"]
    text = (tmp_path / "words").read_text()
    assert text.startswith("all_reduce(sum) #2 of 4000 bytes in group 'default' failed on rank 0 of 2 after ")
    assert text.splitlines()[0].endswith(" s: rank 1 (its pid) has ended")
    assert "rule: every rank takes part in every collective within 20 s" in text
    assert "so:   the ranks are no longer in step, and this process cannot continue" in text
    assert "try:  start again from the newest checkpoint" in text


def peer_stopped(world: World) -> str:
    pids = world.all_gather_json(os.getpid())
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "went on"
    try:
        world.barrier()
    except CommError as error:
        os.kill(pids[1], signal.SIGCONT)
        return texts(error)
    return "no error"


def test_a_hang_ends_with_the_timeout_and_names_the_stopped_rank(pool: Any) -> None:
    text, other = pool.run(peer_stopped, ranks=2, comm_timeout_s=1.5)
    assert other == "went on"
    assert "barrier #2 in group 'default' failed on rank 0 of 2" in text
    assert text.splitlines()[0].endswith(") is stopped")
    assert "within 1.5 s" in text


def comes_late(world: World, late_s: float) -> int:
    before = num_heartbeats()
    if world.rank == 1:
        time.sleep(late_s)
    world.meet(30.0)
    world.meet(30.0)
    return num_heartbeats() - before


def test_ranks_meet_after_longer_than_a_collective_may_last(pool: Any) -> None:
    first, _ = pool.run(comes_late, 3.0, ranks=2, comm_timeout_s=1.5)
    assert first > 10  # a rank that waits is not taken for one that hangs


def never_comes(world: World) -> str:
    if world.rank == 1:
        time.sleep(3.0)
        return ""
    with pytest.raises(CommError) as caught:
        world.meet(0.2)
    return texts(caught.value)


def test_who_never_comes_to_a_meeting_is_missed_in_the_barrier(pool: Any) -> None:
    said, _ = pool.run(never_comes, ranks=2, comm_timeout_s=1.5)
    assert said.startswith("barrier #1 in group 'default' failed on rank 0 of 2 after 1.5 s")


def one_skips(world: World) -> str:
    """Rank 2 leaves out a collective, and so waits in another one than the rest."""
    try:
        if world.rank != 2:
            world.all_reduce(torch.ones(8))
        else:
            world.with_own_group("other").barrier()
        world.barrier()
    except CommError as error:
        return texts(error).splitlines()[0]
    return "no error"


def test_a_rank_that_is_elsewhere_is_named(pool: Any) -> None:
    said = pool.run(one_skips, ranks=3, comm_timeout_s=2)
    for rank in (0, 1):
        assert "all_reduce(sum) #1 of 32 bytes" in said[rank]
        assert "rank 2 waits in with_own_group('other') #1" in said[rank]


def disagreeing(world: World) -> str:
    agree(world, "the seed", {"a": 1, "b": [2]})
    agree(world, "key order", {"a": 1, "b": 2} if world.rank else {"b": 2, "a": 1})
    try:
        agree(world, "the plan", {"dp": 3 if world.rank == 1 else 2})
    except CommError as error:
        return texts(error)
    return "no error"


def test_disagreement_names_the_odd_rank_on_all_ranks(pool: Any) -> None:
    said = pool.run(disagreeing, ranks=3)
    assert said[0] == said[1] == said[2]
    assert said[0].startswith('the plan is {"dp": 3} on rank 1 and {"dp": 2} on rank 0, 2\n')
    assert "rule: the plan is the same on all 3 ranks" in said[0]
    assert "try:  start rank 1 with the same code, configuration and environment as the others" in said[0]


def all_different(world: World) -> str:
    try:
        agree(world, "the plan", {"dp": world.rank, "tp": 1})
    except CommError as error:
        return texts(error)
    return "no error"


def test_each_rank_s_own_value_is_told(pool: Any) -> None:
    said = pool.run(all_different, ranks=3)
    assert said[0] == said[1] == said[2]
    assert said[0].startswith('the plan is {"dp": 1} on rank 1, {"dp": 2} on rank 2 and {"dp": 0} on rank 0\n')
    assert "try:  start rank 1, 2 with the same code" in said[0]


class Gathered(World):
    """A world of many ranks, of which the values are known."""

    def all_gather_json(self, value: Any) -> list[Any]:
        return value


def test_of_many_values_a_few_are_told() -> None:
    with pytest.raises(CommError) as caught:
        agree(Gathered(JobSpec()), "the seed", [0, 1, 2, 3, 4, 5, 0])
    assert caught.value.problems[0].given == (
        "the seed is 1 on rank 1, 2 on rank 2, 3 on rank 3, something else on rank 4, 5 and 0 on rank 0, 6"
    )


def first_rank(world: World) -> tuple[Any, str]:
    def fails() -> None:
        raise DataError(given="a", rule="b", consequence="c", nearest="d")

    calls: list[int] = []
    answer = on_first_rank(world, lambda: calls.append(world.rank) or {"rank": world.rank})
    with pytest.raises(DataError) as caught:
        on_first_rank(world, fails)
    return (answer, calls), str(caught.value)


def test_rank_0_answers_for_all_or_fails_for_all(pool: Any) -> None:
    text = "a\n  rule: b\n  so:   c\n  try:  d"
    assert pool.run(first_rank, ranks=2) == [(({"rank": 0}, [0]), text), (({"rank": 0}, []), text)]


def test_a_tie_counts_rank_0_as_usual(pool: Any) -> None:
    for text in pool.run(disagreeing, ranks=2):
        assert text.startswith('the plan is {"dp": 3} on rank 1 and {"dp": 2} on rank 0\n')


def test_agreement_of_one() -> None:
    agree(World(JobSpec()), "anything", {"x": 1})


# --- rendezvous ---------------------------------------------------------------------------------------------------------


def alone(port: int = 0, **changes: Any) -> JobSpec:
    return JobSpec(run_id="r", world_size=2, local_world=2, master_port=port, source="torchrun", **changes)


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError) as caught:
            join_world(alone(port), device_type="cpu", timeout_s=1)
    text = str(caught.value)
    assert f"rank 0 was told to listen at 127.0.0.1:{port}, and another process already does" in text
    assert "the ranks would join another job, so nothing was started" in text
    assert "try:  MASTER_PORT=" in text
    assert f"MASTER_PORT={port} " not in text
    assert caught.value.exit_code == 2


def test_an_address_of_another_host() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 cannot listen at 203\.0\.113\.7:\d+ \("):
        join_world(alone(4000, master_addr="203.0.113.7"), device_type="cpu", timeout_s=1)
    with pytest.raises(LaunchError, match=r"the master address 'no-such-host\.invalid' does not resolve on this host"):
        join_world(alone(4000, master_addr="no-such-host.invalid"), device_type="cpu", timeout_s=1)


def test_workers_of_servers_have_no_meeting_point() -> None:
    job = replace(alone(0), servers=1, server_addresses=("127.0.0.1:4000",))
    with pytest.raises(
        LaunchError, match=r"rank 0 of 2 was to meet the others in a job with parameter servers\n  rule: "
    ):
        join_world(job, device_type="cpu", timeout_s=60)


def test_a_rank_that_never_comes_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = JobSpec(
            run_id="r",
            world_size=3,
            local_world=3,
            master_port=port,
            source="unisono",
            listen_fd=os.dup(server.fileno()),
        )
        with pytest.raises(CommError) as caught:
            join_world(job, device_type="cpu", timeout_s=5, meet_timeout_s=0.3)
    assert str(caught.value).startswith("ranks 1, 2 of 3 did not arrive within 0.3 s (seen from rank 0)")


def test_a_store_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(CommError) as caught:
        join_world(alone(port, rank=1, local_rank=1), device_type="cpu", timeout_s=5, meet_timeout_s=0.5)
    assert f"rank 1 of 2 found no store at 127.0.0.1:{port} in 0.5 s" in str(caught.value)


def test_the_scheduler_is_named_where_it_serves(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job = replace(alone(listener.getsockname()[1]), shared_store=True, source="dmlc", listen_fd=None)
        store = serve_store(job, listener, bytes(32), "scheduler")
        with pytest.raises(LaunchError) as refused:
            open_store(job, 5, {"HOME": str(tmp_path)})
        store.close()
    assert "the scheduler refuses this process, which made a wrong proof" in str(refused.value)
    with pytest.raises(CommError) as absent:
        open_store(job, 0.2, {"HOME": str(tmp_path)})
    assert "  rule: the scheduler keeps a store open there while the job runs" in texts(absent.value)
    assert "  try:  see why the scheduler did not start" in texts(absent.value)


def test_rank_0_is_sought_at_its_own_address_not_at_the_launchers(tmp_path: Path) -> None:
    from torch.distributed import TCPStore

    server = socket.create_server(("127.0.0.1", 0))
    job = replace(
        alone(server.getsockname()[1], rank=1, local_rank=1), shared_store=True, source="torchrun", listen_fd=None
    )
    store = TCPStore("127.0.0.1", job.master_port, None, True, wait_for_workers=False, master_listen_fd=server.detach())
    with pytest.raises(CommError) as absent:
        open_store(job, 0.2, {"HOME": str(tmp_path)})
    assert texts(absent.value).startswith("rank 1 of 2 found no rank 0 in 0.2 s (rank 0 has not written its address")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    store.set(f"unisono/{job.run_id}/rank 0", f"127.0.0.1:{port}")
    with pytest.raises(CommError) as silent:
        open_store(job, 0.2, {"HOME": str(tmp_path)})
    assert texts(silent.value).startswith(f"rank 1 of 2 found no rank 0 at 127.0.0.1:{port} in 0.2 s (")
    assert f"writes its address into the launcher's, at 127.0.0.1:{job.master_port}" in texts(silent.value)


@pytest.mark.parametrize("fd", ["99999", "4000000000", "a file"])
def test_a_descriptor_that_is_no_socket(fd: str, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        number = file.fileno() if fd == "a file" else int(fd)
        with pytest.raises(LaunchError, match=f"UNISONO_LISTEN_FD={number}, which is no socket of this process"):
            join_world(replace(alone(29511), listen_fd=number), device_type="cpu", timeout_s=5)


def test_a_launchers_store_at_a_name_that_does_not_resolve(capfd: pytest.CaptureFixture[str]) -> None:
    job = replace(
        alone(29511, rank=1, local_rank=1), master_addr="no-such-host.invalid", shared_store=True, source="torchrun"
    )
    with pytest.raises(
        CommError, match=r"found no store at no-such-host\.invalid:29511 in 0\.5 s \(the name does not resolve"
    ):
        join_world(job, device_type="cpu", timeout_s=5, meet_timeout_s=0.5)
    assert capfd.readouterr() == ("", "")  # no frames of C++


def test_a_master_address_that_does_not_resolve_is_an_error_within_the_time() -> None:
    # the resolver may need a second for its own answer; the name can also appear later, as in Kubernetes
    job = replace(alone(29511, rank=1, local_rank=1), master_addr="no-such-host.invalid")
    with pytest.raises(CommError) as caught:
        join_world(job, device_type="cpu", timeout_s=5, meet_timeout_s=0.5)
    assert "rank 1 of 2 found no store at no-such-host.invalid:29511 in 0.5 s (" in str(caught.value)
    with pytest.raises(LaunchError) as refused:
        join_world(replace(job, rank=0, local_rank=0), device_type="cpu", timeout_s=5, meet_timeout_s=0.5)
    assert str(refused.value).startswith("the master address 'no-such-host.invalid' does not resolve on this host (")


def meet_at_a_given_port(job: JobSpec, port: int) -> list[str]:
    """As srun, mpirun and exported variables have it: nobody holds the port beforehand."""
    world = join_world(replace(job, master_port=port, listen_fd=None), device_type="cpu", timeout_s=20)
    seen = listening(os.getpid())
    world.barrier()
    world.close()
    return [where for where in seen if where.endswith(f":{port:04X}")]


def test_rank_0_listens_at_the_master_address_alone(pool: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert pool.run(meet_at_a_given_port, port, ranks=2, joined=False) == [[f"0100007F:{port:04X}"], []]


def meet(job: JobSpec, port: int) -> tuple[int, float]:
    """Joins at a store that outlives this attempt, as torchrun's does; the epochs of the ranks differ on purpose."""
    if job.rank == 0:
        # the others look first, and find a complete handshake: that of the dead
        time.sleep(0.5)
    world = join_world(
        replace(job, master_port=port, listen_fd=None, shared_store=True, restart_count=job.rank),
        device_type="cpu",
        timeout_s=20,
    )
    total = world.all_reduce(torch.ones(1)).item()
    epoch = world.job.restart_count
    world.close()
    return epoch, total


def test_a_store_full_of_an_earlier_attempts_keys_does_no_harm(pool: Any) -> None:
    from torch.distributed import TCPStore

    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=server.detach())
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        # others find these first: one that says nothing, and then, each time, the port of an attempt that has ended
        store.set("unisono/pool/rank 0", f"127.0.0.1:{stranger.getsockname()[1]}")
        for ranks in (3, 2, 2):
            assert pool.run(meet, port, ranks=ranks, joined=False) == [(0, float(ranks))] * ranks
    assert store.list_keys() == ["unisono/pool/rank 0"], (
        "more than the place of rank 0 is in a store that anyone may read"
    )
