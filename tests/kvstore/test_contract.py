"""One meaning over all kinds of store: the same calls, run on every kind, with MXNet's published vectors among them.

A new kind joins by a line in ``KINDS``: how to make it on a World, on how many workers, and what it does of the contract.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

from unisono.dist import World
from unisono.errors import CheckpointError, ConfigError
from unisono.kvstore import KVStore, LocalSGDConfig, ServerConfig, create_kvstore
from unisono.kvstore.server.parameter_server import ParameterServer
from unisono.kvstore.wire.frame import PEER_LIMITS
from unisono.kvstore.wire.frame_server import FrameServer, listen


@dataclass(frozen=True)
class Kind:
    """How a kind is made, and where it differs."""

    make: Callable[..., AbstractContextManager[KVStore]]
    ranks: int
    averages: bool = False
    """Updates are averaged over workers, sums are not made; pushes need an optimizer."""
    applies_each: bool = False
    """Every worker's push is an update of its own, in any order; pushes need an optimizer, which stays; there is one init."""

    @property
    def sums(self) -> bool:
        return not (self.averages or self.applies_each)


def plain(kind: str, **options: Any) -> Callable[..., AbstractContextManager[KVStore]]:
    return lambda world: closing(create_kvstore(kind, world, **options))  # type: ignore[arg-type]


@contextmanager
def served(world) -> Iterator[KVStore]:
    """Rank 0 runs the two servers: their processes take longer to start than all cases, and test_servers has them."""
    secret = bytes(32)
    services = [ParameterServer(number) for number in range(2)] if world.rank == 0 else []
    ours = [FrameServer([listen("127.0.0.1")], service, secret, PEER_LIMITS) for service in services]
    servers = [tuple(each) for each in world.broadcast_json([server.addresses[0] for server in ours])]
    alone = World(replace(world.job, run_id="contract"))  # as adr 0010 has it: no process group
    with closing(create_kvstore("dist_async", alone, servers=ServerConfig(addresses=servers, secret=secret))) as store:
        yield store
        world.barrier()
    for each in [*services, *ours]:
        each.close()


KINDS = {
    "local": Kind(plain("local"), 1),
    "device": Kind(plain("device"), 1),
    "dist_sync": Kind(plain("dist_sync", shared_memory=False), 2),
    "dist_sync alone": Kind(plain("dist_sync"), 1),
    "dist_sync, shared memory": Kind(plain("dist_sync", shared_memory=True), 2),
    "dist_async": Kind(served, 2, applies_each=True),
    "dist_async alone": Kind(served, 1, applies_each=True),
    "dist_local": Kind(
        plain("dist_local", local_sgd=LocalSGDConfig(local_steps=1, outer_lr=1.0, outer_momentum=0.0)), 2, averages=True
    ),
}
ALL = [pytest.param(name, marks=pytest.mark.gpu if name == "device" else ()) for name in KINDS]
SUMMING = [param for param, kind in zip(ALL, KINDS.values(), strict=True) if kind.sums]


def here(name: str) -> str:
    return torch.accelerator.current_accelerator().type if name == "device" else "cpu"  # type: ignore[union-attr]


def check(pool: Pool, name: str, *cases: Callable[..., None]) -> None:
    """Each case on a fresh store; they share workers, whose rendezvous takes longer than the case."""
    pool.run(on_stores, name, [case.__name__ for case in cases], ranks=KINDS[name].ranks)


def on_stores(world, name: str, cases: list[str]) -> None:
    for case in cases:
        with KINDS[name].make(world) as store, torch.device(here(name)):
            globals()[case](store, KINDS[name])


def refusal(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


# --- without an optimizer a push replaces --------------------------------------------------------------------------


def replaces(store: KVStore, kind: Kind) -> None:
    store.init("w", torch.ones(2, 3))
    store.push("w", [torch.ones(2, 3)] * 4).wait()
    assert store.pull("w").wait().tolist() == torch.full((2, 3), 4.0 * kind.ranks).tolist()
    store.push("w", torch.full((2, 3), 8.0))
    assert store.pull("w").wait().unique().tolist() == [8.0 * kind.ranks]  # V7: replaced, not added


def several_keys(store: KVStore, kind: Kind) -> None:
    store.init({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64), "c": torch.zeros(3)})
    values = {key: torch.full_like(store.pull(key).wait(), number) for number, key in enumerate("abc", 1)}
    store.push(values).wait()
    assert [float(each[0]) for each in store.pull(["a", "b", "c"]).wait()] == [n * kind.ranks for n in (1, 2, 3)]
    out = [torch.empty(3), torch.empty(2, dtype=torch.float64)]
    pulled = store.pushpull(["c", "b"], [values["a"], values["b"]], out=out, priority=3).wait()
    assert [float(each[1]) for each in out] == [1 * kind.ranks, 2 * kind.ranks]
    assert all(a is b or a.data_ptr() == b.data_ptr() for a, b in zip(pulled, out, strict=True))
    devices = [torch.empty(3), torch.empty(3)]
    store.pull("c", out=devices).wait()
    assert [each.tolist() for each in devices] == [[1.0 * kind.ranks] * 3] * 2


def never_an_alias(store: KVStore, kind: Kind) -> None:
    start, value = torch.ones(3), torch.ones(3)
    store.init("w", start)
    start.zero_()
    assert store.pull("w").wait().tolist() == [1.0] * 3
    sent = store.push("w", value)
    value.zero_()
    sent.wait()
    pulled = store.pull("w").wait()
    assert pulled.tolist() == [1.0 * kind.ranks] * 3
    pulled.zero_()
    assert store.pull("w").wait().tolist() == [1.0 * kind.ranks] * 3


def a_pull_sees_the_pushes_before_it(store: KVStore, kind: Kind) -> None:
    store.init("w", torch.zeros(1))
    first = (store.push("w", torch.ones(1)), store.pull("w"))[1]
    second = store.pushpull("w", torch.full((1,), 5.0))
    assert (float(first.wait()), float(second.wait())) == (kind.ranks, 5 * kind.ranks)
    assert first.done()
    assert second.done()
    assert float(first.wait()) == kind.ranks  # once is enough


def rows(store: KVStore, kind: Kind) -> None:
    store.init("table", torch.ones(3, 3))
    out = torch.full((3, 3), 7.0)
    some = store.row_sparse_pull("table", torch.tensor([2, 2]), out).wait()  # V7
    assert some.ids.tolist() == [2]
    assert some.values.tolist() == [[1.0] * 3]
    assert out.tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]
    store.row_sparse_pull("table", torch.tensor([], dtype=torch.int64), out).wait()
    assert not out.any()
    # rank r adds r + 1 to row r and 10 to row 2, which is there twice
    ids = torch.tensor([2, store.rank, 2])
    values = torch.tensor([[4.0], [store.rank + 1.0], [6.0]]).expand(3, 3)
    store.push("table", (ids, values)).wait()
    first, second, third = store.pull("table").wait()[:, 0].tolist()
    assert (first, second, third) == (1.0, 2.0 if kind.ranks > 1 else 0.0, 10.0 * kind.ranks)
    store.push("table", [(ids[:1], values[:1]), (ids[:1], values[:1])]).wait()
    assert store.pull("table").wait()[:, 0].tolist() == [0.0, 0.0, 8.0 * kind.ranks]
    store.push("table", (ids[:0], values[:0])).wait()
    assert not store.pull("table").wait().any()


def dtypes(store: KVStore, kind: Kind) -> None:
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
    store.init({str(dtype): torch.zeros(5, dtype=dtype) for dtype in kinds})
    store.push({str(dtype): torch.arange(5, dtype=dtype) for dtype in kinds}).wait()
    for dtype in kinds:
        pulled = store.pull(str(dtype)).wait()
        assert (pulled.dtype, pulled.tolist()) == (dtype, [n * kind.ranks for n in range(5)])


@pytest.mark.parametrize("name", SUMMING)
def test_values(pool: Pool, name: str) -> None:
    check(pool, name, replaces, several_keys, never_an_alias, a_pull_sees_the_pushes_before_it, rows, dtypes)


# --- with an optimizer ---------------------------------------------------------------------------------------------


def updates(store: KVStore, kind: Kind) -> None:
    store.init("w", torch.ones(1))
    store.set_optimizer("sgd", lr=2.0, momentum=0.0)
    pulled: list[float] = []
    for _ in range(3):
        pulled.append(float(store.pushpull("w", torch.full((1,), -1.0 - store.rank)).wait()))
        if kind.applies_each:
            store.barrier()
            pulled[-1] = float(store.pull("w").wait())
            store.barrier()
    # V7: w += 2 x sum, from 1, two workers pushing rank + 1
    assert pulled == ([4.0, 7.0, 10.0] if kind.averages else [7.0, 13.0, 19.0] if kind.ranks == 2 else [3.0, 5.0, 7.0])


def small_step(store: KVStore, kind: Kind) -> None:
    store.set_optimizer("sgd", lr=0.01, momentum=0.0, weight_decay=0.0)
    store.init("w", torch.zeros(2, 2))  # a key that comes after the optimizer has one too
    store.push("w", torch.ones(2, 2) / (1 if kind.averages else kind.ranks)).wait()
    store.barrier()
    assert store.pull("w").wait().flatten().tolist() == pytest.approx([-0.01] * 4)  # V7
    store.barrier()
    store.set_learning_rate(0.5)
    store.push("w", torch.ones(2, 2) / (1 if kind.averages else kind.ranks)).wait()
    store.barrier()
    assert store.pull("w").wait().flatten().tolist() == pytest.approx([-0.51] * 4, rel=1e-5)


def matrices_decay(store: KVStore, kind: Kind) -> None:
    shapes = {"w": (2, 2), "b": (4,), "x.bias": (2, 2), "embedding": (2, 2)}
    store.init({key: torch.ones(shape) for key, shape in shapes.items()})
    store.set_optimizer("adamw", lr=0.5, weight_decay=0.5, decay_exclude=("emb*",))
    store.push({key: torch.zeros(shape) for key, shape in shapes.items()}).wait()
    store.barrier()
    left = {key: float(store.pull(key).wait().flatten()[0]) for key in shapes}
    assert left == {"w": 0.75**kind.ranks if kind.applies_each else 0.75, "b": 1.0, "x.bias": 1.0, "embedding": 1.0}


def gradients_stay_the_callers(store: KVStore, kind: Kind) -> None:
    store.init("w", torch.ones(2, 2))
    for optimizer in ("adamw",) if kind.applies_each else ("sgd", "adam", "adamw", "lamb", "lars"):
        store.set_optimizer(optimizer, lr=0.1, weight_decay=0.5)
        gradient = torch.full((2, 2), 0.3)
        for _ in range(2):
            store.push("w", gradient).wait()
        assert torch.equal(gradient, torch.full((2, 2), 0.3))
        assert not torch.equal(store.pull("w").wait(), torch.ones(2, 2))


def may_be_changed_once_pushed(store: KVStore, kind: Kind) -> None:
    store.init({"w": torch.ones(300_000)})
    store.set_optimizer("sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
    gradient = torch.ones(300_000)
    sent = store.push("w", gradient)
    gradient.fill_(100.0)
    sent.wait()
    store.barrier()
    assert store.pull("w").wait().unique().tolist() == [0.0 if kind.averages else 1.0 - kind.ranks]


def goes_on_exactly(store: KVStore, kind: Kind) -> None:
    if kind.applies_each and kind.ranks > 1:  # nobody knows the order of their pushes
        return

    def push(steps: range) -> None:
        for step in steps:
            store.push({"w": torch.full((3, 2), step + 0.1), "b": torch.full((2,), step - 0.3)}).wait()

    store.init({"w": torch.ones(3, 2), "b": torch.ones(2)})
    store.set_optimizer("adamw", lr=0.1)
    push(range(3))
    saved = {name: each.clone() for name, each in store.state_dict().items()}
    push(range(3, 6))
    went = {name: each.clone() for name, each in store.state_dict().items()}
    store.load_state_dict(saved)
    push(range(3, 6))
    assert went.keys() == store.state_dict().keys()
    assert all(torch.equal(went[name], each) for name, each in store.state_dict().items())
    del saved["value/b"]
    text = refusal(CheckpointError, lambda: store.load_state_dict(saved))
    assert "differ in 'value/b'" in text


@pytest.mark.parametrize("name", ALL)
def test_updates(pool: Pool, name: str) -> None:
    check(
        pool,
        name,
        updates,
        small_step,
        matrices_decay,
        gradients_stay_the_callers,
        may_be_changed_once_pushed,
        goes_on_exactly,
    )


# --- MXNet's names ---------------------------------------------------------------------------------------------------


def whole_number_keys(store: KVStore, kind: Kind) -> None:
    assert store.type == store.kind
    refusal(ConfigError, lambda: store.pull("3"))  # before init nothing is settled
    store.set_optimizer("sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
    store.init([3, 7], [torch.ones(2), torch.zeros(2, 2)])
    store.push([7, 3], [torch.ones(2, 2), torch.ones(2)]).wait()
    store.barrier()
    assert store.pull(3).wait().tolist() == [0.0 if kind.averages else 1.0 - kind.ranks] * 2
    assert [each.shape for each in store.pull([7, 3]).wait()] == [(2, 2), (2,)]
    assert store.row_sparse_pull(7, torch.tensor([1])).wait().ids.tolist() == [1]
    store.barrier()
    pulled = store.pushpull({3: torch.zeros(2), 7: torch.zeros(2, 2)}).wait()
    assert [each.shape for each in pulled] == [(2,), (2, 2)]
    assert {"value/3", "value/7"} <= store.state_dict().keys()
    store.barrier()
    text = refusal(ConfigError, lambda: store.push("3", torch.ones(2)))
    assert "key '3' of type str in a store of int keys\n  rule: the keys of a store are all strings or all" in text


def optimizer_states(store: KVStore, kind: Kind) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "states.safetensors"
        text = refusal(ConfigError, lambda: store.save_optimizer_states(file))
        assert "save_optimizer_states on a store without an optimizer\n  rule: " in text
        store.init({"w": torch.ones(3, 2), "b": torch.ones(2)})
        store.set_optimizer("adamw", lr=0.1)
        store.push({"w": torch.full((3, 2), 0.5), "b": torch.full((2,), -0.5)}).wait()
        store.barrier()
        store.save_optimizer_states(file)
        saved = {name: each.clone() for name, each in store.state_dict().items() if name.startswith("optim/")}
        store.barrier()
        store.push({"w": torch.full((3, 2), 2.0), "b": torch.full((2,), 3.0)}).wait()
        store.barrier()
        before = store.pull("w").wait()
        store.load_optimizer_states(file)
        state = store.state_dict()
        assert all(torch.equal(each, state[name]) for name, each in saved.items())
        assert len(saved) == 6
        assert torch.equal(store.pull("w").wait(), before)
        store.barrier()
        assert f"{folder}/none cannot be read" in refusal(
            CheckpointError, lambda: store.load_optimizer_states(f"{folder}/none")
        )
        assert "cannot be written" in refusal(ConfigError, lambda: store.save_optimizer_states(f"{folder}/no/file"))
        if not kind.applies_each:  # servers keep their first optimizer
            store.set_optimizer("sgd", lr=0.1)
            text = refusal(CheckpointError, lambda: store.load_optimizer_states(file))
            assert "with the state of 'adamw'\n  rule: this store's optimizer is 'sgd'" in text
            assert "try:  set_optimizer('adamw', ...) before" in text


def updater(store: KVStore, kind: Kind) -> None:
    calls: list[Any] = []

    def add_half(key: Any, total: torch.Tensor, stored: torch.Tensor) -> None:
        calls.append(key)
        stored += total / 2

    if not kind.sums:
        text = refusal(ConfigError, lambda: store.set_updater(add_half))
        assert f"set_updater on a store of kind '{store.kind}'\n  rule: " in text
        reason = "servers run no code that is sent to them" if kind.applies_each else "its rounds are averages of what"
        assert reason in text
        assert "try:  set_optimizer, or kind 'dist_sync'" in text
        return
    store.init({5: torch.ones(2), 6: torch.ones(3, 2)})
    store.set_updater(add_half)
    for _ in range(2):
        store.push(5, [torch.ones(2), torch.ones(2)]).wait()
    assert store.pull(5).wait().tolist() == [1.0 + 2 * kind.ranks] * 2
    store.push(6, (torch.tensor([1]), torch.full((1, 2), 4.0))).wait()
    assert store.pull(6).wait()[:, 0].tolist() == [1.0, 1.0 + 2 * kind.ranks, 1.0]
    assert calls == [5, 5, 6]
    assert "without an optimizer" in refusal(ConfigError, lambda: store.save_optimizer_states("file"))
    store.set_optimizer("sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
    assert store.pushpull(5, torch.zeros(2)).wait().tolist() == [1.0 + 2 * kind.ranks] * 2


@pytest.mark.parametrize(
    ("optimizer", "given", "nearest"),
    [
        (
            lambda values: torch.optim.SGD([values], lr=0.1, momentum=0.9),
            "torch.optim.sgd.SGD",
            "set_optimizer('sgd', lr=0.1, momentum=0.9, weight_decay=0)",
        ),
        (
            lambda values: torch.optim.AdamW([values], lr=0.1, betas=(0.9, 0.99)),
            "torch.optim.adamw.AdamW",
            "set_optimizer('adamw', lr=0.1, weight_decay=0.01, beta1=0.9, beta2=0.99, eps=1e-08)",
        ),
        (lambda values: torch.optim.SGD, "torch.optim.sgd.SGD, a class", "set_optimizer('sgd', lr=...)"),
        (
            lambda values: torch.optim.RMSprop([values]),
            "torch.optim.rmsprop.RMSprop",
            "OptimOptions(kind=..., clip_norm=0.0) with sgd, adam, adamw, lamb, lars; or set_updater, where a worker updates",
        ),
        (
            lambda values: None,
            "builtins.NoneType",
            "OptimOptions(kind=..., clip_norm=0.0) with sgd, adam, adamw, lamb, lars; or set_updater, where a worker updates",
        ),
    ],
)
def test_an_optimizer_of_torch_is_refused_with_the_options_like_it(optimizer: Any, given: str, nearest: str) -> None:
    store = create_kvstore("local")
    text = refusal(ConfigError, lambda: store.set_optimizer(optimizer(torch.zeros(2))))
    assert text == (
        f"set_optimizer of {given}\n"
        "  rule: a store builds an optimizer of its own for each key, on each worker or server, from options\n"
        "  so:   no optimizer was set\n"
        f"  try:  {nearest}"
    )
    store.set_optimizer("adamw", lr=0.1, weight_decay=0.01, beta1=0.9, beta2=0.99, eps=1e-08)  # as it says
    store.close()


@pytest.mark.parametrize("name", ALL)
def test_names_of_mxnet(pool: Pool, name: str) -> None:
    check(pool, name, whole_number_keys, optimizer_states, updater)


# --- init, broadcast, refusals -------------------------------------------------------------------------------------


def rank_zeros_value_wins(store: KVStore, kind: Kind) -> None:
    mine = torch.full((2,), store.rank + 3.0)
    store.init("w", mine)
    assert store.pull("w").wait().tolist() == mine.tolist() == [3.0, 3.0]
    other = torch.full((2,), store.rank + 5.0)
    if kind.applies_each:
        assert "on a store of kind 'dist_async'" in refusal(ConfigError, lambda: store.broadcast({"not kept": other}))
    else:
        store.broadcast({"not kept": other})
        assert other.tolist() == [5.0, 5.0]
    assert "key 'not kept'" in refusal(ConfigError, lambda: store.pull("not kept"))
    store.barrier()
    assert (store.num_workers, 0 <= store.rank < kind.ranks) == (kind.ranks, True)


def refusals(store: KVStore, kind: Kind) -> None:
    text = refusal(ConfigError, lambda: store.push("layer.weight", torch.ones(1)))
    assert "init('layer.weight', value) on every worker first" in text
    store.init({"layer.weight": torch.ones(2, 3)})
    assert "did you mean 'layer.weight'?" in refusal(ConfigError, lambda: store.pull("layer.weights"))
    assert "init of key 'layer.weight'" in refusal(ConfigError, lambda: store.init("layer.weight", torch.ones(2, 3)))
    text = refusal(ConfigError, lambda: store.push("layer.weight", torch.ones(3, 2)))
    assert "a value of shape [3, 2] and dtype torch.float32" in text
    assert "was initialised with shape [2, 3] and dtype torch.float32" in text
    text = refusal(ConfigError, lambda: store.push("layer.weight", torch.ones(2, 3, dtype=torch.float64)))
    assert "dtype torch.float64" in text
    assert "key 3 of type int in a store of str keys" in refusal(ConfigError, lambda: store.push(3, torch.ones(1)))
    assert "key True of type bool" in refusal(ConfigError, lambda: store.push(True, torch.ones(1)))
    assert "2 keys with 1 values" in refusal(ConfigError, lambda: store.push(["a", "b"], [torch.ones(1)]))
    assert "an empty list for key" in refusal(ConfigError, lambda: store.push("layer.weight", []))
    text = refusal(ConfigError, lambda: store.push("layer.weight", (torch.tensor([2]), torch.ones(1, 3))))
    assert "row ids from 2 to 2" in text
    assert "whole numbers from 0 to 1" in text
    text = refusal(ConfigError, lambda: store.push("layer.weight", (torch.tensor([0]), torch.ones(1, 2))))
    assert "rows of shape [1, 2]" in text
    assert "without an optimizer" in refusal(ConfigError, lambda: store.set_learning_rate(0.1))
    assert "did you mean 'sgd'?" in refusal(ConfigError, lambda: store.set_optimizer("sgdd"))
    assert "learning" in refusal(ConfigError, lambda: store.set_optimizer("sgd", learning=3))
    assert "beta1 is read by adam" in refusal(ConfigError, lambda: store.set_optimizer("sgd", beta1=0.5))
    assert "clip_norm = 1" in refusal(ConfigError, lambda: store.set_optimizer("sgd", clip_norm=1.0))


@pytest.mark.parametrize("name", ALL)
def test_manners(pool: Pool, name: str) -> None:
    check(pool, name, rank_zeros_value_wins, refusals)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_plain_script_needs_no_world(kind: Any) -> None:
    with closing(create_kvstore(kind)) as store:
        store.init(9, torch.ones(2))
        store.push(9, [torch.ones(2)] * 3)
        assert (store.type, store.rank, store.num_workers, store.pull(9).wait().tolist()) == (kind, 0, 1, [3.0, 3.0])
    with pytest.raises(ConfigError, match="'dist_async' with no servers"):
        create_kvstore("dist_async")


def test_kinds_that_do_not_fit_are_refused(pool: Pool) -> None:
    pool.run(kinds_that_do_not_fit, ranks=1)
    pool.run(one_process_kinds, ranks=2)


def kinds_that_do_not_fit(world) -> None:
    assert "did you mean 'dist_sync'?" in refusal(ConfigError, lambda: create_kvstore("dist_snyc", world))  # type: ignore[arg-type]
    assert "local_sgd=LocalSGDConfig(local_steps=16)" in refusal(
        ConfigError, lambda: create_kvstore("dist_local", world)
    )
    text = refusal(ConfigError, lambda: create_kvstore("local", world, hierarchical=True, shared_memory=True))
    assert "leave out hierarchical, shared_memory" in text
    text = refusal(ConfigError, lambda: create_kvstore("dist_sync", world, local_sgd=LocalSGDConfig(local_steps=1)))
    assert "local_sgd is for 'dist_local'" in text
    store = create_kvstore("device", world)
    store.init("w", torch.ones(1))
    text = refusal(ConfigError, lambda: store.push("w", torch.ones(1)))
    assert "'device' adds on the accelerator" in text
    assert "kind = 'local'" in text


def one_process_kinds(world) -> None:
    assert "'local' is a store of one process" in refusal(ConfigError, lambda: create_kvstore("local", world))
