"""``dist_async`` as a store: threads with a store each, and servers in this process unless a case is about processes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import Nursery
from parameter_servers import parameter_servers
from pool import Pool
from torch import Tensor, nn

from unisono.dist import JobSpec, World
from unisono.errors import CheckpointError, CommError, ConfigError
from unisono.kvstore import KVStore, ServerConfig, create_kvstore
from unisono.kvstore.backends import parameter_server
from unisono.kvstore.backends.server_client import host_copy
from unisono.kvstore.server.parameter_server import ParameterServer
from unisono.kvstore.wire.frame import PEER_LIMITS
from unisono.kvstore.wire.frame_server import FrameServer, listen

SECRET = bytes(range(32))
Address = tuple[str, int]


def store_of(servers: list[Address], rank: int = 0, world: int = 1, secret: bytes = SECRET, **options: Any) -> KVStore:
    config = ServerConfig(addresses=servers, secret=secret, worker_restart_count=options.pop("restart_count", 0))
    return create_kvstore("dist_async", World(JobSpec(rank=rank, world_size=world)), servers=config, **options)


@contextmanager
def serving(count: int = 2) -> Iterator[list[Address]]:
    services = [ParameterServer(number) for number in range(count)]
    servers = [FrameServer([listen("127.0.0.1")], service, SECRET, PEER_LIMITS) for service in services]
    yield [server.addresses[0] for server in servers]
    for each in [*services, *servers]:
        each.close()


def on_workers(count: int, servers: list[Address], work: Callable[[KVStore], Any], **options: Any) -> list[Any]:
    """``work`` on a store each; what they returned, in rank order."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with closing(store_of(servers, rank, count, **options)) as store:
                results[rank] = work(store)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


def plain_sgd(store: KVStore, lr: float = 1.0) -> None:
    store.set_optimizer("sgd", lr=lr, momentum=0.0, weight_decay=0.0)


# --- values --------------------------------------------------------------------------------------------------------


def test_every_acknowledged_push_is_applied_once(pool: Pool, nursery: Nursery, tmp_path: Path) -> None:
    """Two worker processes, a server process, whole numbers: sums are exact whatever the order."""
    with parameter_servers(tmp_path, nursery=nursery) as servers:
        pushed = pool.run(push_numbers, servers.addresses, servers.secret, ranks=2, joined=False)
        with closing(store_of(servers.addresses, 2, 3, servers.secret)) as late:
            found = {"w": torch.zeros(3000, 1000), "b": torch.zeros(5)}
            late.init(found)
            with pytest.raises(ConfigError, match="a push without an optimizer on a store of kind 'dist_async'"):
                late.push("b", torch.ones(5))
    for key, value in found.items():
        assert torch.equal(value.flatten()[:5], -sum(torch.tensor(each[key]) for each in pushed)), key
        assert value.unique().numel() <= 5


def push_numbers(job: JobSpec, servers: list[Address], secret: bytes) -> dict[str, list[float]]:
    draw = random.Random(job.rank)
    with closing(store_of(servers, job.rank, 2, secret)) as store:
        store.init({"w": torch.zeros(3000, 1000), "b": torch.zeros(5)})
        plain_sgd(store)
        total = torch.zeros(5)
        for _ in range(12):
            numbers = torch.tensor([float(draw.randrange(100)) for _ in range(5)])
            total += numbers
            store.push({"w": numbers.repeat(600_000).view(3000, 1000), "b": numbers}, priority=draw.randrange(3))
        store.barrier()
        return {"w": total.tolist(), "b": total.tolist()}


def test_values_of_many_dtypes_devices_and_forms() -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    with serving() as servers, closing(store_of(servers)) as store:
        plain_sgd(store, lr=0.5)
        store.init({str(dtype): torch.zeros(6, 2, dtype=dtype) for dtype in dtypes})
        for dtype in dtypes:
            key, ones = str(dtype), torch.ones(6, 2, dtype=dtype)
            store.push([key, key], [[ones, ones, ones], ones])  # three devices' values; the key once more
            across = torch.empty(2, 6, dtype=dtype).t()  # not contiguous
            beside = torch.empty(6, 2, dtype=dtype)
            store.pull(key, out=[across, beside], priority=9).wait()
            assert across.tolist() == beside.tolist() == [[-2.0] * 2] * 6
            store.push(key, [(torch.tensor([4, 1, 4]), torch.ones(3, 2, dtype=dtype)), ones[:, :] * 0])
            rows = torch.ones(3, 2, dtype=dtype)
            store.push(key, (torch.tensor([4, 1, 4]), rows), priority=-1)
            some = store.row_sparse_pull(key, torch.tensor([5, 4, 1])).wait()
            assert (some.ids.tolist(), some.values[:, 0].tolist()) == ([1, 4, 5], [-3.0, -4.0, -2.0])
            store.push(key, (torch.tensor([], dtype=torch.int64), rows[:0])).wait()


def test_rows_of_a_table_in_several_chunks() -> None:
    with serving() as servers, closing(store_of(servers)) as store:
        plain_sgd(store)
        start = torch.arange(6000 * 512, dtype=torch.float32).view(6000, 512)  # 12 MiB: 3 chunks
        store.init({"table": start, "odd": torch.zeros(1100, 1025)})
        ids = torch.tensor([5999, 0, 2047, 2048, 4096])
        store.push("table", (ids, start[ids])).wait()
        out = torch.full_like(start, 7.0)
        some = store.row_sparse_pull("table", torch.cat([ids, torch.tensor([17])]), out).wait()
        assert some.values[:, 1].tolist() == [0.0, 17 * 512 + 1.0, 0.0, 0.0, 0.0, 0.0]
        assert int(out.count_nonzero()) == 512
        assert torch.equal(store.pull("table").wait()[1:2047], start[1:2047])
        with pytest.raises(ConfigError, match="rows of 'odd', whose chunks are no whole rows"):
            store.row_sparse_pull("odd", torch.tensor([1]))


def test_buffers_of_the_host_are_on_the_host_whatever_the_default_device() -> None:
    start, ids = torch.zeros(64, 3), torch.tensor([1, 5])
    out, some = torch.full_like(start, 7.0), torch.full_like(start, 7.0)
    with serving() as servers, closing(store_of(servers)) as store, torch.device("meta"):
        plain_sgd(store)
        store.init("table", start)
        store.push("table", start + 2).wait()
        assert store.pull("table", out).wait().unique().tolist() == [-2.0]
        assert store.row_sparse_pull("table", ids, some).wait().values.unique().tolist() == [-2.0]
        assert host_copy(out.T).device.type == "cpu"


@pytest.mark.gpu
def test_values_on_an_accelerator() -> None:
    with serving() as servers, closing(store_of(servers)) as store, torch.device("cuda"):
        plain_sgd(store)
        values = {"w": torch.ones(300, 7), "h": torch.ones(9, dtype=torch.bfloat16)}
        store.init(values)
        store.push({key: 2 * value for key, value in values.items()})
        pulled = store.pull(["w", "h"]).wait()
        assert all(each.is_cuda and each.unique().tolist() == [-1.0] for each in pulled)


# --- clocks, rates, refusals ---------------------------------------------------------------------------------------


def test_nobody_is_more_than_the_staleness_ahead() -> None:
    made, lock, ahead = dict.fromkeys(range(3), 0), threading.Lock(), []

    def work(store: KVStore) -> None:
        store.init("w", torch.zeros(1))
        draw = random.Random(store.rank)
        for clock in range(12):
            time.sleep(draw.uniform(0, 0.02) * (1 + 2 * store.rank))
            with lock:
                made[store.rank] = clock + 1
            store.step()
            with lock:
                ahead.append(clock + 1 - min(made.values()))
        store.barrier()

    with serving(1) as servers:
        on_workers(3, servers, work, staleness=2)
    assert 0 < max(ahead) <= 2


def test_a_learning_rate_reaches_the_servers_with_the_push() -> None:
    def work(store: KVStore) -> None:
        store.init("w", torch.zeros(3))
        plain_sgd(store, lr=1.0)
        store.push("w", torch.ones(3)).wait()  # the optimizer's own rate
        store.set_learning_rate(0.5 if store.rank else 0.25)
        store.push("w", torch.ones(3)).wait()
        store.barrier()
        assert store.pull("w").wait().tolist() == [-2.75] * 3

    with serving() as servers:
        on_workers(2, servers, work)


def test_refusals() -> None:
    with serving() as servers, closing(store_of(servers, staleness_lr_decay=True)) as store:
        with pytest.raises(ConfigError, match="barrier before init on a store of kind 'dist_async'"):
            store.barrier()
        store.init({"w": torch.zeros(1500, 1000), "n": torch.zeros(2)})
        with pytest.raises(ConfigError, match="a second init, of 'b'"):
            store.init("b", torch.zeros(1))
        with pytest.raises(ConfigError, match=r"'lamb'\) after init, which has cut 'w'"):
            store.set_optimizer("lamb", lr=0.1)
        with pytest.raises(ConfigError, match="compression 'int8' after init"):
            store.set_compression("int8")
        plain_sgd(store)
        with pytest.raises(CommError, match="for servers that have 'sgd'"):
            store.set_optimizer("adam", lr=0.1)
        bad = store.push("n", torch.tensor([1.0, float("nan")]))
        with pytest.raises(CommError, match="a push of 'n' with a NaN or an infinity"):
            bad.wait()
        assert store.pull("n").wait().tolist() == [0.0, 0.0]
    alone = World(JobSpec())
    with pytest.raises(ConfigError, match="a store of kind 'dist_async' with no servers"):
        create_kvstore("dist_async", alone)
    with pytest.raises(ConfigError, match=r"with no servers\n.*\n.*\n.*ServerConfig.from_environ\(os.environ\)"):
        ServerConfig(addresses=[], secret=bytes(32))
    for wrong in ("127.0.0.1:1", ("127.0.0.1", "1"), ("127.0.0.1", 0), ("", 1), ("127.0.0.1", 65536)):
        with pytest.raises(
            ConfigError, match=r"with server .*\n  rule: each server is a pair of its host and its port"
        ) as e:
            ServerConfig(addresses=[wrong], secret=bytes(32))  # pyright: ignore[reportArgumentType]
        assert repr(wrong) in str(e.value)
    with pytest.raises(ConfigError, match=r"with a secret of 3 bytes\n  rule: it has 32"):
        store_of([("127.0.0.1", 1)], secret=b"abc")
    with pytest.raises(ConfigError, match=r"with staleness -1\n  rule: it is 0 or more, or None"):
        store_of([("127.0.0.1", 1)], staleness=-1)
    with pytest.raises(ConfigError, match="leave out staleness, staleness_lr_decay"):
        create_kvstore("local", alone, staleness=1, staleness_lr_decay=True)


def test_the_first_start_waits_for_all_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_server, "_MEETING_S", 0.2)
    told = r"1 of 2 workers, and values for 0 of 1 chunks, after 0 s"
    with serving() as servers, closing(store_of(servers, 1, 2)) as store, pytest.raises(CommError, match=told):
        store.init("w", torch.zeros(2))


def test_a_worker_that_is_started_again_goes_on() -> None:
    with serving() as servers, closing(store_of(servers)) as first:
        first.init("w", torch.zeros(2))
        plain_sgd(first)
        first.push("w", torch.ones(2)).wait()
        with closing(store_of(servers, restart_count=1)) as second:
            value = torch.full((2,), 7.0)
            second.init("w", value)
            assert value.tolist() == [-1.0, -1.0]
            plain_sgd(second)
            second.push("w", torch.ones(2)).wait()  # its first, and no duplicate of the other's first
            assert second.pull("w").wait().tolist() == [-2.0, -2.0]
            late = first.push("w", torch.ones(2))
            with pytest.raises(CommError, match="worker 0 of restart 0"):
                late.wait()


def test_what_nobody_waited_for_is_told_later() -> None:
    with serving(1) as servers, closing(store_of(servers)) as store:
        store.init("w", torch.zeros(2))
        plain_sgd(store)
        store.push("w", torch.full((2,), float("inf")))
        with pytest.raises(CommError, match="a push of 'w' with a NaN"):
            store.barrier()
        store.barrier()  # told once


# --- compression ---------------------------------------------------------------------------------------------------


def test_coded_gradients_arrive_in_the_end() -> None:
    def work(store: KVStore) -> dict[str, dict[str, float]]:
        store.set_compression("2bit:0.5")
        store.init({"w": torch.zeros(2000, 1000), "b": torch.zeros(3, dtype=torch.float64)})
        plain_sgd(store)
        for _ in range(8):
            gradients = {"w": torch.full((2000, 1000), 0.2), "b": torch.tensor([0.25, -0.1, 0.0]).double()}
            store.push(gradients).wait()
        store.barrier()
        assert store.pull("w").wait().unique().tolist() == [-3.0]  # 2 x 1.6 in steps of 0.5, 0.1 held back by each
        assert store.pull("b").wait().tolist() == [-4.0, 1.0, 0.0]
        held = store.state_dict()
        assert held["compression/residual/b@0"].tolist() == pytest.approx([0.0, -0.3, 0.0])
        return store.stats()

    with serving() as servers:
        stats, _ = on_workers(2, servers, work)
    assert stats["w"]["bytes_in"] == 8_000_000
    assert 500_000 <= stats["w"]["bytes_out"] < 500_100  # what is short of a word in each chunk
    assert stats["w"]["residual"] == pytest.approx(0.5)


def test_a_refused_push_leaves_nothing_in_the_residuals() -> None:
    with serving(1) as servers, closing(store_of(servers)) as store:
        store.set_compression("int8")
        store.init("w", torch.zeros(5))
        plain_sgd(store)
        bad = store.push("w", torch.tensor([1.0, float("inf"), 0.0, 0.0, 0.0]))
        with pytest.raises(CommError, match="with a NaN or an infinity"):
            bad.wait()
        store.push("w", torch.full((5,), 127.0)).wait()
        assert store.pull("w").wait().tolist() == [-127.0] * 5


def test_low_rank_codes_need_all_workers_at_once() -> None:
    with serving(1) as servers, closing(store_of(servers)) as store:
        with pytest.raises(ConfigError, match="servers see one worker at a time"):
            store.set_compression("powersgd:2")
        store.set_compression("int8")
        store.set_compression("none")  # nothing was sent yet
        store.init("w", torch.zeros(1))
        assert store.stats() == {}


# --- a plain loop, its checkpoint, and other kinds -----------------------------------------------------------------


def train(store: KVStore, model: nn.Module, steps: range) -> None:
    """A plain PyTorch loop; what it needs of the store is pushpull."""
    parameters = dict(model.named_parameters())
    for step in steps:
        data = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        gradients: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            gradients[name], parameter.grad = parameter.grad, None
        store.pushpull(gradients, out=[each.data for each in parameters.values()]).wait()


def begin(store: KVStore) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    store.set_optimizer("adamw", lr=0.01)
    store.init(dict(model.named_parameters()))
    return model


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_loop_goes_on_exactly_on_new_servers(codec: str) -> None:
    with serving() as servers, closing(store_of(servers)) as store:
        store.set_compression(codec)
        model = begin(store)
        train(store, model, range(4))
        saved = {name: each.clone() for name, each in store.state_dict().items()}
        # with a codec a worker has not quite what the servers have; after a state, a pull is in full
        store.pull(list(dict(model.named_parameters())), [each.data for each in model.parameters()]).wait()
        train(store, model, range(4, 8))
        whole = store.state_dict()
    with serving(1) as servers, closing(store_of(servers)) as store:
        store.set_compression(codec)
        model = begin(store)
        store.load_state_dict(saved)
        store.pull(list(dict(model.named_parameters())), [each.data for each in model.parameters()]).wait()
        train(store, model, range(4, 8))
        assert whole.keys() == store.state_dict().keys()
        assert all(torch.equal(whole[name], each) for name, each in store.state_dict().items())
        if codec != "none":
            bare = {name: each for name, each in saved.items() if not name.startswith("compression/")}
            with pytest.raises(CheckpointError, match="is missing in the checkpoint"):
                store.load_state_dict(bare)


def test_a_state_goes_to_dist_sync_and_back() -> None:
    """One worker, so that the order of pushes is one; the servers' kernels give the bits of one process."""
    with serving() as servers, closing(store_of(servers)) as there:
        model = begin(there)
        assert not any(each.any() for name, each in there.state_dict().items() if name.startswith("optim/"))
        train(there, model, range(3))
        here = create_kvstore("dist_sync", World(JobSpec()))
        other = begin(here)
        here.load_state_dict(there.state_dict())
        other.load_state_dict(model.state_dict())
        train(here, other, range(3, 6))
        train(there, model, range(3, 6))
        ends = here.state_dict(), there.state_dict()
        assert ends[0].keys() == ends[1].keys()
        assert all(torch.equal(each, ends[1][name]) for name, each in ends[0].items())
        train(here, other, range(6, 8))
        there.load_state_dict(here.state_dict())
        assert torch.equal(there.pull("0.weight").wait(), other[0].weight)
