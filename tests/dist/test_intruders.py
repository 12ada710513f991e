"""What processes that are not of the job can do to its ranks: real ranks, and an intruder of another user under root."""

from __future__ import annotations

import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from intruder import as_another_user, connect, drip, hold, junk, late_hello, take_a_place_in_gloo, until_closed
from modes import public_folder
from procs import listening, wait_until

from unisono.dist import JobSpec, World, join_world, rendezvous, store_server
from unisono.dist import world as world_module
from unisono.dist.authentication import (
    LENGTH,
    AuthenticationRefused,
    Challenge,
    Hello,
    PeerError,
    Verdict,
    authenticate,
    frame,
    receive,
)
from unisono.dist.job_store import JobStore
from unisono.dist.rendezvous import open_store, serve_store
from unisono.errors import CommError, ConfigError, LaunchError

SECRET = bytes(range(32))
TEXT = "the word that only ranks may hear"


# --- whole jobs ------------------------------------------------------------------------------------------------------


def with_intruder(job: JobSpec, attack: str) -> dict[str, Any]:
    """Rank 1 comes late: an intruder has the port before it. Then both exchange something."""
    said: Any = None
    release = None
    if job.rank == 1:
        wait_until(lambda: reachable(job.master_port), "rank 0 listens")
        match attack:
            case "hello":
                said = as_another_user(late_hello, job.master_port, job.run_id, job.world_size)
            case "junk":
                said = as_another_user(junk, job.master_port)
            case "connects":
                release, said = in_background(hold, job.master_port, 1000)
            case _:
                raise AssertionError(attack)
    world = join_world(job, device_type="cpu", timeout_s=20)
    heard = world.broadcast_json(TEXT if world.rank == 0 else None)
    total = world.all_reduce(torch.ones(1)).item()
    world.close()
    if release is not None:
        said = release()
    return {"heard": heard, "sum": total, "said": said}


def in_background(attack: Any, *args: Any) -> tuple[Any, None]:
    """Starts an attack that holds what it has; returns, once it has it, a function that ends it and returns its result."""
    held, release = os.pipe()
    ready, has_it = os.pipe()
    results: list[Any] = []

    def run(*more: Any) -> Any:
        os.close(release)
        return attack(*more)

    thread = threading.Thread(target=lambda: results.append(as_another_user(run, *args, held, has_it)))
    thread.start()
    os.read(ready, 1)

    def end() -> Any:
        os.close(release)
        thread.join()
        for fd in (held, ready, has_it):
            os.close(fd)
        return results[0]

    return end, None


def reachable(port: int) -> bool:
    try:
        with connect(port) as sock:
            receive(sock, Challenge, time.monotonic() + 1)
            return True
    except (OSError, PeerError):
        return False


@pytest.mark.parametrize("attack", ["hello", "junk", "connects"])
def test_an_intruder_is_no_rank_and_hears_nothing(pool: Any, attack: str) -> None:
    results = pool.run(with_intruder, attack, ranks=2, joined=False)
    assert [(result["heard"], result["sum"]) for result in results] == [(TEXT, 2.0)] * 2
    said = results[1]["said"]
    if attack == "hello":
        assert said[:3] == ["no secret", "proof", "proof"]
        assert "proof" in said[3]
        assert said[4] == ""
    elif attack == "junk":
        assert said == [""] * 4
    else:
        assert said > 900


def test_the_secret_of_a_users_ranks_is_not_an_intruders(tmp_path: Path) -> None:
    job = JobSpec(world_size=2, local_world=2, source="torchrun")
    with public_folder() as home:
        environ = {"HOME": str(home)}
        secret = home / ".config/unisono/secret"
        assert rendezvous.job_secret(job, environ) == secret.read_bytes()
        if os.geteuid() == 0:
            assert as_another_user(lambda: os.listdir(home)) == [".config"]  # as far as she is let
            assert as_another_user(lambda: len(secret.read_bytes())).startswith("failed: PermissionError")
            secret.parent.chmod(0o755)
            assert as_another_user(lambda: len(secret.read_bytes())).startswith("failed: PermissionError")
        # several hosts need not have one home
        assert rendezvous.job_secret(replace(job, local_world=1), environ) is None
    (tmp_path / "file").touch()
    assert rendezvous.job_secret(job, {"HOME": str(tmp_path / "file")}) is None


def warned(job: JobSpec, home: str) -> list[str]:
    """What a rank logs that joins its job twice, where its user's secret can be at ``home``."""
    said: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"{record.levelname} {record.getMessage()}")

    # the secret is then the user's own, if there can be one
    own = {name: value for name, value in os.environ.items() if not name.startswith("UNISONO_SECRET_")}
    handler = Heard()
    logging.getLogger("unisono").addHandler(handler)
    try:
        with mock.patch.dict(os.environ, own | {"HOME": home}, clear=True):
            store = open_store(replace(job, source="torchrun"), 20.0)
            for _ in range(2):
                world = join_world(replace(job, source="torchrun"), device_type="cpu", timeout_s=20, store=store)
                assert world.all_reduce(torch.ones(1)).item() == job.world_size
                world.close()
            store.close()
    finally:
        logging.getLogger("unisono").removeHandler(handler)
    return said


def test_a_job_without_a_secret_is_warned_of_once_by_one_rank(pool: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, *others = pool.run(warned, str(tmp_path / "file"), ranks=3, joined=False)
    assert first == [
        "WARNING this job has no secret, so its 3 ranks trust their hosts and the network between them; "
        "UNISONO_SECRET_FILE names one (docs/security.md, Ranks of a job)"
    ]
    assert others == [[], []]
    (tmp_path / "home").mkdir()
    assert pool.run(warned, str(tmp_path / "home"), ranks=3, joined=False) == [[], [], []]


def absent_rank(job: JobSpec) -> str:
    if job.rank == 1:
        wait_until(lambda: reachable(job.master_port), "rank 0 listens")
        return str(as_another_user(late_hello, job.master_port, job.run_id, job.world_size))
    try:
        join_world(job, device_type="cpu", timeout_s=5, meet_timeout_s=3)
    except CommError as error:
        return str(error)
    return "joined"


def test_rank_0_says_who_came_in_place_of_a_rank(pool: Any) -> None:
    text = pool.run(absent_rank, ranks=2, joined=False)[0]
    assert text.startswith("rank 1 of 2 did not arrive within 3 s (seen from rank 0); ")
    assert "3 connections made a wrong proof of the job's secret (the newest from 127.0.0.1:" in text
    assert "left without a proof (the newest from 127.0.0.1:" in text
    assert (
        "\n  rule: all ranks join before the first step\n  so:   no step was made\n  try:  see the log of rank 1"
        in text
    )


def another_secret(job: JobSpec, folder: str) -> str:
    file = Path(folder) / f"secret-{job.rank}"
    file.write_bytes(bytes([job.rank]) * 32)
    file.chmod(0o600)
    os.environ["UNISONO_SECRET_FILE"] = str(file)
    try:
        join_world(job, device_type="cpu", timeout_s=5, meet_timeout_s=2 if job.rank == 0 else 30)
    except (CommError, LaunchError) as error:
        return f"{type(error).__name__} {error}"
    return "joined"


def test_a_rank_with_another_secret_is_told_at_once(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(another_secret, str(tmp_path), ranks=2, joined=False)
    assert first.startswith("CommError rank 1 of 2 did not arrive within 2 s")
    assert second.startswith("LaunchError rank 1 of 2 at 127.0.0.1:")
    assert (
        "rank 0 refuses this process, which made a wrong proof of the job's secret\n  rule: the ranks of a job hold one secret"
        in second
    )
    assert "  so:   this rank has not joined, and has sent neither the secret nor data" in second
    assert "  try:  unisono launch, or the same UNISONO_SECRET_FILE" in second


def wrong_key(job: JobSpec) -> str:
    """The connections of rank 1's process are not those of rank 1, as far as the others can tell."""
    if job.rank == 1:
        real = world_module.join_ranks

        def other_key(*args: Any) -> Any:
            rendezvous, store = real(*args)
            return replace(rendezvous, key=bytes(32)), store

        world_module.join_ranks = other_key
    try:
        join_world(job, device_type="cpu", timeout_s=10).close()
    except CommError as error:
        return str(error)
    finally:
        if job.rank == 1:
            world_module.join_ranks = real
        dist.destroy_process_group()
    return "joined"


def test_a_connection_of_gloo_without_a_proof_ends_the_job_before_anything_is_sent(pool: Any) -> None:
    for rank, text in enumerate(pool.run(wrong_key, ranks=2, joined=False)):
        assert text.startswith(
            f"the connection to rank {1 - rank} in a new process group made no proof of the job's secret"
        )
        assert "rule: the ranks of a group prove their connections to each other before they exchange data" in text
        assert "so:   another process has taken that rank's place; nothing was sent to it" in text


def raced(job: JobSpec, folder: str) -> dict[str, Any]:
    """An intruder is at rank 0's gloo listener before rank 1."""
    pid, said, release = Path(folder) / "pid", None, None
    if job.rank == 0:
        pid.write_text(str(os.getpid()))
    real = dist.init_process_group

    def late(*args: Any, **kwargs: Any) -> None:
        nonlocal release
        victim = int(pid.read_text())
        known = f"{job.master_port:04X}"
        wait_until(lambda: any(not at.endswith(known) for at in listening(victim)), "gloo of rank 0 listens")
        ports = [int(at.rpartition(":")[2], 16) for at in listening(victim)]
        release, _ = in_background(take_a_place_in_gloo, ports)
        real(*args, **kwargs)

    if job.rank == 1:
        dist.init_process_group = late
    result = "joined"
    try:
        world = join_world(job, device_type="cpu", timeout_s=4)
        world.broadcast_json(TEXT if world.rank == 0 else None)
        world.barrier()
        world.close()
    except (CommError, RuntimeError) as error:
        result = str(error)
    finally:
        dist.init_process_group = real
        if dist.is_initialized():
            dist.destroy_process_group()
        if release is not None:
            said = release()
    return {"result": result, "said": said}


@pytest.mark.full
def test_an_intruder_at_a_port_of_gloo_never_hears_what_ranks_say(pool: Any, tmp_path: Path) -> None:
    """Which of two ranks listens for the other depends on their ports: it takes some jobs until the intruder's place counts."""
    taken = 0
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        first, second = pool.run(raced, str(folder), ranks=2, joined=False)
        heard = bytes.fromhex(second["said"])
        assert TEXT.encode() not in heard
        taken += first["result"] != "joined"
        if taken and number > 2:
            break
    assert taken, "the intruder never had a place"


def announces(world: World) -> str:
    try:
        if world.rank == 1:
            dist.broadcast(torch.tensor([2**40]), src=1)
            return ""
        world.broadcast_json(src=1)
    except CommError as error:
        return str(error)
    return "no error"


def announces_to_all(world: World) -> str:
    try:
        if world.rank == 1:
            dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([-5]))
            return ""
        world.all_gather_json("x")
    except CommError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("function", "size"), [(announces, 2**40), (announces_to_all, -5)])
def test_what_a_rank_announces_is_not_allocated(pool: Any, function: Any, size: int) -> None:
    text = pool.run(function, ranks=2)[0]
    assert text.startswith(
        f"another rank announces {size} bytes of JSON\n  rule: at most 67108864 are exchanged between ranks"
    )
    assert "so:   no memory was allocated for it" in text


# --- the store's port ------------------------------------------------------------------------------------------------


@contextmanager
def served(world_size: int = 2, secret: bytes | None = SECRET) -> Iterator[tuple[JobStore, int]]:
    """A store of rank 0 in this process, and its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    port = listener.getsockname()[1]
    job = JobSpec(run_id="r", world_size=world_size, local_world=world_size, master_port=port, source="unisono")
    store = serve_store(job, listener, secret, "rank 0")
    try:
        yield store, port
    finally:
        store.close()


def member(port: int, name: str = "rank 1", secret: bytes | None = SECRET, run: str = "r", size: int = 2) -> JobStore:
    sock = connect(port)
    try:
        authenticate(sock, secret, name, run, size)
    except BaseException:
        sock.close()
        raise
    return JobStore(sock, secret)


def test_a_store_between_members() -> None:
    with served() as (mine, port):
        other = member(port)
        mine.set("a", "1")
        assert other.get("a") == b"1"
        assert (other.add("n", 2), mine.add("n", 3)) == (2, 5)
        assert other.compare_set("a", "0", "2") == b"1"
        assert other.compare_set("a", "1", "2") == b"2"
        mine.append("a", b"3")
        assert mine.multi_get(["a", "n"]) == [b"23", b"5"]
        assert (mine.check(["a"]), mine.check(["a", "none"]), other.num_keys()) == (True, False, 2)
        assert (other.delete_key("a"), other.delete_key("a")) == (True, False)
        threading.Timer(0.1, lambda: mine.set("late", b"x")).start()
        assert other.get("late") == b"x"
        with pytest.raises(dist.DistStoreError, match=r"wait timed out after 0\.2 s for none"):
            other.wait(["none"], timeout=timedelta(seconds=0.2))
        # as torch's C++ code calls it
        prefixed = dist.PrefixStore("p", mine)
        prefixed.clone().set("k", b"v")
        assert (mine.get("p/k"), prefixed.get("k"), prefixed.multi_get(["k"])) == (b"v", b"v", [b"v"])
        prefixed.set_timeout(timedelta(seconds=0.1))
        with pytest.raises(dist.DistStoreError, match=r"timed out after 0\.1 s"):
            prefixed.get("none")
        other.close()
    with pytest.raises(dist.DistNetworkError, match="is closed"):
        mine.set("a", "1")
    assert threading.active_count() == 1


def test_a_rank_that_is_there_is_not_replaced_and_one_that_died_may_come_again() -> None:
    with served() as (mine, port):
        first = member(port)
        with pytest.raises(AuthenticationRefused, match="taken"):
            member(port)
        with pytest.raises(AuthenticationRefused, match="taken"):
            member(port, "rank 0")
        results: list[Any] = []
        joining = threading.Thread(target=lambda: results.append(mine.join(7, 10)))
        joining.start()
        first.close()
        wait_until(lambda: "rank 1" not in mine.server.members()[1], "its end is noticed")
        second = member(port)
        prefix, restart_count, missing = second.join(0, 10)
        joining.join()
        assert results == [(prefix, restart_count, missing)]
        assert (restart_count, missing) == (7, [])
        # a rank that is started alone meets nobody under the prefix of the others
        second.close()
        third = member(port)
        assert third.join(0, 0.1) == ("", 0, [0])
        third.close()


def test_who_is_refused_and_why() -> None:
    with served() as (mine, port):
        for reason, arguments in (
            ("proof", {"secret": bytes(32)}),
            ("no secret", {"secret": None}),
            ("run", {"run": "other"}),
            ("size", {"size": 3}),
            ("name", {"name": "rank 2"}),
            ("name", {"name": "x" * 3000}),
        ):
            with pytest.raises(AuthenticationRefused, match=f"^{reason}$"):
                member(port, **arguments)
        assert mine.num_keys() == 0
        assert mine.server.refused()[0].startswith("2 connections had a name that this job does not have (the newest")
        assert mine.server.refused()[1].startswith("1 connection made a wrong proof of the job's secret")
        assert mine.server.refused()[2].startswith("1 connection had no secret, where this job has one")
    with served(secret=None) as (mine, port):
        with pytest.raises(AuthenticationRefused, match=r"^secret$"):
            member(port)
        member(port, secret=None).close()
        assert mine.server.refused()[0].startswith("1 connection had a secret, where this job has none (the newest")


def test_a_wrong_secret_at_a_place_that_is_looked_up_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun a rank asks again until its time is over, since the place may be an earlier attempt's."""
    (tmp_path / "secret").write_bytes(bytes(range(100, 132)))
    (tmp_path / "secret").chmod(0o600)
    with served() as (_, port):
        launchers = mock.Mock(check=lambda _: True, get=lambda _: f"127.0.0.1:{port}".encode())
        monkeypatch.setattr(rendezvous, "_launchers_store", lambda *_: launchers)
        job = JobSpec(
            run_id="r", world_size=2, rank=1, local_rank=1, local_world=2, source="torchrun", shared_store=True
        )
        with pytest.raises(CommError, match=r"found no rank 0 at .* made a wrong proof of the job's secret") as caught:
            open_store(job, 0.3, {"UNISONO_SECRET_FILE": str(tmp_path / "secret")})
    assert caught.value.problems[0].nearest == "the same UNISONO_SECRET_FILE (32 bytes, mode 0600) on every host"


@pytest.mark.parametrize("shared_store", [False, True])
def test_a_master_address_that_does_not_resolve_is_named(shared_store: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    spec = JobSpec(run_id="r", world_size=2, rank=1, local_world=1, master_addr="node-7", master_port=4000)
    with pytest.raises(CommError, match="Name or service not known") as caught:
        open_store(replace(spec, source="torchrun", shared_store=shared_store), 0.3, {})
    assert caught.value.problems[0].nearest.startswith(
        "set MASTER_ADDR, here 'node-7', to a name or address of the host"
    )


def test_without_a_secret_a_name_alone_is_told() -> None:
    """To a server that has one, which is another job's; the server knows then why this rank does not come."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame(Challenge(bytes(32), True)) + frame(Verdict(refusal="no secret")))
        with pytest.raises(AuthenticationRefused, match=r"^no secret$"):
            authenticate(ours, None, "rank 1", "r", 2)
        hello = receive(theirs, Hello, time.monotonic() + 5)
        assert (hello.name, hello.run_id, hello.proof) == ("rank 1", "", b"")


def test_an_unknown_request_is_refused() -> None:
    with served() as (_, port):
        other = member(port)
        with pytest.raises(
            dist.DistStoreError, match=r"rank 1 sent \['unset', 'a'\], which is no request of the store of a job"
        ):
            other._ask("unset", "a")
        assert other.num_keys() == 0
        other.close()


class Recorder:
    """A socket that remembers what is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.sent = sock, b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self.sock.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)


def test_a_recorded_hello_is_useless() -> None:
    with served() as (_, port):
        with connect(port) as sock:
            recorder = Recorder(sock)
            authenticate(recorder, SECRET, "rank 1", "r", 2)  # type: ignore[arg-type]
        with connect(port) as sock:
            receive(sock, Challenge, time.monotonic() + 5)
            sock.sendall(recorder.sent)
            assert receive(sock, Verdict, time.monotonic() + 5).refusal == "proof"


def test_a_false_rank_0_learns_nothing_and_is_not_believed() -> None:
    """It copies the challenge of the real one, and what the real one answers to another rank."""
    with served(), socket.create_server(("127.0.0.1", 0)) as false:
        said: list[bytes] = []

        def relay() -> None:
            sock, _ = false.accept()
            with sock:
                sock.sendall(frame(Challenge(bytes(32), True)))
                said.append(sock.recv(4096))
                sock.sendall(frame(Verdict(proof=bytes(32))))

        thread = threading.Thread(target=relay)
        thread.start()
        job = JobSpec(run_id="r", rank=1, local_rank=1, world_size=2, local_world=2, source="unisono")
        with pytest.raises(AuthenticationRefused, match="server"), connect(false.getsockname()[1]) as sock:
            authenticate(sock, SECRET, "rank 1", job.run_id, 2)
        thread.join()
        assert SECRET not in said[0]


def test_what_announces_much_or_does_not_end_is_cut_off_and_takes_no_memory() -> None:
    with served() as (mine, port):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for data in (LENGTH.pack(2**31), b"a" * 2**22):
            with connect(port) as sock:
                receive(sock, Challenge, time.monotonic() + 5)
                try:
                    sock.sendall(data)
                except ConnectionError:
                    continue
                assert until_closed(sock) == b""
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
        assert mine.server.refused()[0].startswith("2 connections announced a message over the size limit")


def test_a_member_does_not_fill_the_memory_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_MAX_STORE_BYTES", 1 << 20)
    with served() as (mine, port):
        other = member(port)
        for number in range(15):
            other.set(str(number), b"a" * (1 << 16))
        with pytest.raises(dist.DistStoreError, match="the store holds 1 MiB, which is all it takes"):
            other.set("15", b"a" * (1 << 16))
        with pytest.raises(dist.DistStoreError, match="the store holds 1 MiB"):
            other.append("14", b"a" * (1 << 16))
        other.set("14", b"")  # in the place of a value, and again room
        other.set("15", b"b")
        assert mine.get("15") == b"b"
        other.close()


@pytest.mark.parametrize("whole", [True, False], ids=["sent", "announced"])
def test_a_request_of_more_than_4_MiB_is_refused_and_the_store_goes_on(whole: bool) -> None:
    """By a rank, which has proved itself, but does not keep to what ``JobStore`` sends."""
    assert store_server.MAX_MESSAGE_BYTES == 4 << 20
    with served(world_size=3) as (mine, port):
        largest = (4 << 20) - len(frame(["set", "k", b"a" * 2**16])) + LENGTH.size + 2**16
        with connect(port) as sock:
            authenticate(sock, SECRET, "rank 1", "r", 3)
            sock.sendall(frame(["set", "k", b"a" * largest]))
            assert receive(sock, object, time.monotonic() + 20) is True
            assert mine.get("k") == b"a" * largest
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            data = frame(["set", "k", b"b" * (largest + 1)])
            assert LENGTH.unpack_from(data) == (4 * 2**20 + 1,)
            try:
                sock.sendall(data if whole else LENGTH.pack(2**31))
            except ConnectionError:
                assert whole
            assert until_closed(sock) == b""
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
        # nothing of it was taken, and the others go on
        assert mine.get("k") == b"a" * largest
        other = member(port, "rank 2", size=3)
        other.set("k", b"c")
        assert mine.get("k") == b"c"
        other.close()
        # that rank may come again
        wait_until(lambda: "rank 1" not in mine.server.members()[1], "its end is noticed")
        again = member(port, size=3)
        assert again.get("k") == b"c"
        with pytest.raises(ValueError, match=r"bytes for the store; a value has at most"):
            again.set("k", b"d" * (4 << 20))
        again.close()


def test_one_that_trickles_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "HANDSHAKE_S", 0.4)
    with served() as (mine, port):
        took_s = drip(port, 10.0)
        assert 0.3 < took_s < 5
        assert mine.server.refused()[0].startswith("1 connection made no proof within 0.4 s")


def test_many_that_say_nothing_are_dropped_for_those_that_come_later() -> None:
    with served() as (mine, port):
        held = [connect(port) for _ in range(300)]
        second = member(port)
        assert second.check(["a"]) is False
        assert mine.server.refused()[0].startswith("2")
        for sock in held:
            sock.close()
        second.close()


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("0.0.0.0", "the master address '0.0.0.0' means every interface of this machine"),
        ("8.8.8.8", "the ranks would meet over 8.8.8.8, which is not a private address"),
        ("::ffff:8.8.8.8", "the ranks would meet over ::ffff:8.8.8.8, which is not a private address"),
    ],
)
def test_ranks_meet_at_one_private_address(address: str, said: str) -> None:
    job = JobSpec(run_id="r", world_size=2, local_world=1, master_addr=address, master_port=4000, source="torchrun")
    with pytest.raises(ConfigError) as caught:
        open_store(job, 1.0, {})
    assert caught.value.problems[0].given == said
    assert caught.value.problems[0].consequence.endswith("no port was opened") or "no port opened" in str(caught.value)


def test_ranks_of_one_host_meet_on_loopback_whatever_its_name_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = next(
        (info[4][0] for info in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET) if info[4][0]), "127.0.1.1"
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    job = JobSpec(run_id="r", world_size=2, local_world=2, master_addr=str(own), master_port=port, source="torchrun")
    store = open_store(job, 5.0, {"HOME": str(tmp_path)})
    assert f"0100007F:{port:04X}" in listening(os.getpid())
    other = open_store(replace(job, rank=1, local_rank=1), 5.0, {"HOME": str(tmp_path)})
    assert other.num_keys() == 0
    other.close()
    store.close()
