"""Applied once, as one process would, or not at all; rows, lag, images."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from unisono.errors import CommError, ConfigError
from unisono.kvstore.server.chunk_optimizer import LAYERWISE_OPTIMIZERS, ServerOptimizerSpec
from unisono.kvstore.server.chunk_state import decode_chunk_state, encode_chunk_state, merge_chunks, split_into_chunks
from unisono.kvstore.server.chunk_store import ChunkGradient, ChunkStore, PushHeader
from unisono.kvstore.server.placement import place_chunks
from unisono.optim import OptimOptions, build_optimizer, state_tensors
from unisono.optim.groups import Role, parameter_roles

CHUNK_BYTES = 8 * 1024  # 2048 float32


class Block(nn.Module):
    """The shapes of a small GPT's first block: an embedding, a norm, wide matrices, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(97, 64)
        self.norm = nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.up = nn.Linear(64, 256, bias=False)


OPTIONS = {
    "sgd": OptimOptions(kind="sgd", lr=0.1, momentum=0.0),
    "momentum": OptimOptions(kind="sgd", lr=0.1),
    "nesterov": OptimOptions(kind="sgd", lr=0.1, nesterov=True),
    "adam": OptimOptions(kind="adam", lr=1e-2, weight_decay=0.01),
    "adamw": OptimOptions(kind="adamw", lr=1e-2),
    "lamb": OptimOptions(kind="lamb", lr=1e-2),
    "lars": OptimOptions(kind="lars", lr=1.0),
}


def started(model: nn.Module, options: OptimOptions, servers: int = 1, damped: bool = False):
    named = dict(model.named_parameters())
    whole = set(named) if options.kind in LAYERWISE_OPTIMIZERS else set()
    placed = place_chunks({name: (p.shape, p.dtype) for name, p in named.items()}, servers, CHUNK_BYTES, whole)
    tables = [ChunkStore(placed.chunks_on(server)) for server in range(servers)]
    recipe = ServerOptimizerSpec(options=options, roles=parameter_roles(model), staleness_lr_decay=damped)
    for table in tables:
        table.set_optimizer_spec(ServerOptimizerSpec.from_json(json.loads(json.dumps(recipe.to_json()))))
    for chunk in placed.chunks:
        part = named[chunk.key].detach().flatten()[chunk.start : chunk.start + chunk.num_elements]
        assert tables[chunk.server].init(chunk.number, part)
    return placed, tables


def entries(chunks, gradients: dict[str, torch.Tensor]) -> list[ChunkGradient]:
    return [
        ChunkGradient(c.number, gradients[c.key].flatten()[c.start : c.start + c.num_elements].clone()) for c in chunks
    ]


def everything(tables: list[ChunkStore]) -> dict[str, torch.Tensor]:
    return {name: t for table in tables for name, t in table.state(table.initialised_chunks)[1].items()}


@pytest.mark.parametrize("kind", OPTIONS)
def test_one_worker_gets_the_bits_of_one_process(kind: str) -> None:
    torch.manual_seed(0)
    model, options = Block(), OPTIONS[kind]
    placed, tables = started(model, options, servers=3)
    assert kind in LAYERWISE_OPTIMIZERS or len(placed.chunks_of("qkv.weight")) > 1
    optimizer = build_optimizer(model, options)
    named = dict(model.named_parameters())
    for step in range(20):
        gradients = {name: torch.randn_like(p) for name, p in named.items()}
        lr = options.lr * (1 - step / 40)
        for name, p in named.items():
            p.grad = gradients[name].clone()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for server, table in enumerate(tables):
            for group in placed.groups(named, server):
                outcome = table.push(
                    entries(group, gradients), PushHeader(worker=0, stream=1, sequence_number=step, lr=lr)
                )
                assert (outcome.applied, outcome.refused) == (len(group), "")
    ours = merge_chunks(placed, everything(tables))
    theirs = dict(sorted({**named, **state_tensors(model, optimizer)}.items()))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.detach()), name


def one(value: torch.Tensor, options: OptimOptions, damped: bool = False) -> ChunkStore:
    placed = place_chunks({"w": (value.shape, value.dtype)}, 1)
    table = ChunkStore(placed.chunks)
    table.set_optimizer_spec(
        ServerOptimizerSpec(options=options, roles={"w": Role.NO_DECAY}, staleness_lr_decay=damped)
    )
    table.init(0, value)
    return table


PLAIN = OptimOptions(kind="sgd", lr=0.5, momentum=0.0)


def test_a_push_counts_once_in_its_stream() -> None:
    table = one(torch.zeros(4), PLAIN)
    push = PushHeader(worker=0, stream=1, sequence_number=7)
    gradient = [ChunkGradient(0, torch.ones(4))]
    assert table.push(gradient, push).applied == 1
    again = table.push(gradient, push)
    assert (again.applied, again.duplicates, again.version) == (0, 1, 1)
    assert table.push(gradient, replace(push, stream=2)).applied == 1
    assert table.push(gradient, replace(push, sequence_number=6)).applied == 1  # late, not a duplicate
    assert torch.equal(table.pull(0)[0], torch.full((4,), -1.5))
    # a unit of stream 0, computed by two workers
    assert [table.push(gradient, PushHeader(worker=w, stream=0, sequence_number=3)).applied for w in (0, 1)] == [1, 0]


def test_numbers_with_too_many_gaps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.kvstore.server.chunk_store._MOST_GAPS", 3)
    table = one(torch.zeros(4), PLAIN)
    gradient = [ChunkGradient(0, torch.ones(4))]
    for seq in (0, 2, 4):
        assert table.push(gradient, PushHeader(worker=0, stream=1, sequence_number=seq)).applied == 1
    before = table.pull(0)
    with pytest.raises(CommError, match="push 6 of stream 1, which has 3 gaps before it"):
        table.push(gradient, PushHeader(worker=0, stream=1, sequence_number=6))
    assert torch.equal(table.pull(0)[0], before[0])
    assert table.pull(0)[1] == before[1]
    assert table.push(gradient, PushHeader(worker=0, stream=2, sequence_number=6)).applied == 1  # streams are apart


def test_threads_that_push_the_same_numbers_apply_each_once() -> None:
    table = one(torch.zeros(8), OptimOptions(kind="sgd", lr=1.0, momentum=0.0))
    pushes = [PushHeader(worker=n % 3, stream=0, sequence_number=n) for n in range(40)]

    def work() -> None:
        for push in pushes:
            table.push([ChunkGradient(0, torch.ones(8))], push)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    value, version = table.pull(0)
    assert (value.tolist(), version) == ([-40.0] * 8, 40)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_push_changes_nothing_of_any_chunk(bad: float) -> None:
    placed = place_chunks({"a": ((4,), torch.float32), "b": ((4,), torch.float32)}, 1)
    table = ChunkStore(placed.chunks)
    table.set_optimizer_spec(ServerOptimizerSpec(options=OPTIONS["adamw"], roles=dict.fromkeys("ab", Role.DECAY)))
    for number in (0, 1):
        table.init(number, torch.ones(4))
    good = [ChunkGradient(0, torch.ones(4)), ChunkGradient(1, torch.ones(4))]
    table.push(good, PushHeader(worker=0, stream=1, sequence_number=0))
    before = encode_chunk_state(*table.state([0, 1]))
    broken = [ChunkGradient(0, torch.ones(4)), ChunkGradient(1, torch.tensor([1.0, bad, 1.0, 1.0]))]
    assert table.push(broken, PushHeader(worker=0, stream=1, sequence_number=1)).refused == "non-finite"
    assert encode_chunk_state(*table.state([0, 1])) == before
    assert table.push(good, PushHeader(worker=0, stream=1, sequence_number=1)).applied == 2  # its number is still free


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_bad_element_anywhere_is_found_and_large_ones_are_not_bad(dtype: torch.dtype) -> None:
    table = one(torch.zeros(5000, dtype=dtype), PLAIN)
    for seq, at in enumerate((0, 1, 2049, 4999)):
        for bad in (float("nan"), float("inf"), -float("inf")):
            gradient = torch.randn(5000).to(dtype)
            gradient[at] = bad
            assert table.push([ChunkGradient(0, gradient)], PushHeader(worker=0, stream=1, sequence_number=seq)).refused
    largest = torch.full((5000,), torch.finfo(dtype).max, dtype=dtype)
    assert (
        table.push([ChunkGradient(0, largest)], PushHeader(worker=0, stream=1, sequence_number=9, lr=0.0)).applied == 1
    )


def test_no_rows_are_no_push_of_anything() -> None:
    table = one(torch.ones(6, 3), PLAIN)
    nothing = ChunkGradient(0, torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
    assert table.push([nothing], PushHeader(worker=0, stream=1, sequence_number=0)).applied == 1
    assert table.pull(0)[0].tolist() == [1.0] * 18


def test_lag_counts_the_pushes_of_others_and_damps() -> None:
    table = one(torch.zeros(1), OptimOptions(kind="sgd", lr=1.0, momentum=0.0), damped=True)
    gradient = [ChunkGradient(0, torch.ones(1))]
    for seq in range(3):
        assert (
            table.push(gradient, PushHeader(worker=0, stream=1, sequence_number=seq, base_version=0)).lag == 0
        )  # its own do not count
    assert table.push(gradient, PushHeader(worker=1, stream=2, sequence_number=0, base_version=0)).lag == 3
    assert table.pull(0)[0].item() == pytest.approx(-3.25)
    assert table.push(gradient, PushHeader(worker=0, stream=1, sequence_number=3, base_version=2)).lag == 1
    assert table.pull(0)[0].item() == pytest.approx(-3.75)


def test_rows_touch_their_rows_only() -> None:
    torch.manual_seed(1)
    start = torch.randn(6, 3)
    rows = torch.tensor([1, 4])
    for options in (PLAIN, OPTIONS["momentum"], OPTIONS["adamw"]):
        sparse, dense = one(start, options), one(start[rows], options)
        for seq in range(3):
            gradient = torch.randn(2, 3)
            push = PushHeader(worker=0, stream=1, sequence_number=seq)
            assert sparse.push([ChunkGradient(0, gradient.clone(), rows)], push).applied == 1
            dense.push([ChunkGradient(0, gradient.flatten())], push)
        value = sparse.pull(0)[0].view(6, 3)
        assert torch.equal(value[rows].flatten(), dense.pull(0)[0])
        others = torch.tensor([0, 2, 3, 5])
        assert torch.equal(value[others], start[others])
        assert torch.equal(sparse.pull(0, rows)[0], value[rows])


@pytest.mark.parametrize("rows", [[1, 1], [2, 1], [-1, 2], [0, 6]])
def test_rows_are_sorted_unique_and_in_range(rows: list[int]) -> None:
    table = one(torch.zeros(6, 3), PLAIN)
    with pytest.raises(CommError, match="strictly rising order, or out of range"):
        table.push(
            [ChunkGradient(0, torch.zeros(2, 3), torch.tensor(rows))], PushHeader(worker=0, stream=1, sequence_number=0)
        )
    with pytest.raises(CommError, match="rows of 'w', chunk 0 with 6 rows"):
        table.pull(0, torch.tensor(rows))


def test_image_and_back_is_the_same_server() -> None:
    torch.manual_seed(2)
    model = Block()
    placed, (table,) = started(model, OPTIONS["adamw"])
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    table.push(entries(placed.chunks, gradients), PushHeader(worker=2, stream=3, sequence_number=5))
    image = encode_chunk_state(*table.state(table.initialised_chunks))
    other = ChunkStore(placed.chunks)
    other.set_optimizer_spec(table.optimizer_spec)
    other.load_state(*decode_chunk_state(image))
    assert encode_chunk_state(*other.state(other.initialised_chunks)) == image
    assert other.push(
        entries(placed.chunks, gradients), PushHeader(worker=2, stream=3, sequence_number=5)
    ).duplicates == len(placed.chunks)
    # through a checkpoint's names, onto another number of servers
    wider = place_chunks({name: (p.shape, p.dtype) for name, p in model.named_parameters()}, 2, CHUNK_BYTES)
    whole = merge_chunks(placed, everything([table]))
    assert whole.keys() >= {"qkv.weight", "optim/exp_avg/qkv.weight", "optim/step/norm.bias"}
    parts = split_into_chunks(wider, whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in merge_chunks(wider, parts).items())


def test_first_init_wins_and_is_a_copy() -> None:
    mine = torch.ones(3)
    table = one(mine, PLAIN)
    mine.zero_()
    assert not table.init(0, torch.full((3,), 9.0))
    assert table.pull(0)[0].tolist() == [1.0] * 3
    table.pull(0)[0].zero_()
    assert table.pull(0)[0].tolist() == [1.0] * 3


def test_refusals_change_nothing_and_say_what_to_do() -> None:
    placed = place_chunks({"a": ((4,), torch.float32), "n": ((1,), torch.int64)}, 1)
    table = ChunkStore(placed.chunks)
    push, gradient = PushHeader(worker=0, stream=1, sequence_number=0), [ChunkGradient(0, torch.ones(4))]
    with pytest.raises(CommError, match="has no value yet"):
        table.push(gradient, push)
    with pytest.raises(CommError, match=r"4 elements of torch.float64 for chunk 0"):
        table.init(0, torch.ones(4, dtype=torch.float64))
    table.init(0, torch.zeros(4))
    table.init(1, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(CommError, match="push of 'a' to servers without an optimizer"):
        table.push(gradient, push)
    table.set_optimizer_spec(ServerOptimizerSpec(options=OPTIONS["lamb"], roles={"a": Role.DECAY}))
    for wrong, text in [
        ([ChunkGradient(0, torch.ones(5))], "5 elements of torch.float32"),
        ([ChunkGradient(2, torch.ones(4))], "this server holds 2 chunks"),
        ([ChunkGradient(1, torch.ones(1))], "push of 'n', which is torch.int64"),
        ([*gradient, *gradient], "chunks that are not in strictly rising order"),
        ([ChunkGradient(0, torch.ones(1, 1), torch.tensor([0]))], "rows of 'a' with optimizer kind 'lamb'"),
    ]:
        with pytest.raises(CommError, match=text):
            table.push(wrong, push)
    for lr in (-0.1, float("inf")):
        with pytest.raises(CommError, match="learning rate is finite and at least 0"):
            table.push(gradient, replace(push, lr=lr))
    with pytest.raises(CommError, match="for servers that have 'lamb'"):
        table.set_optimizer_spec(ServerOptimizerSpec(options=PLAIN, roles={"a": Role.DECAY}))
    value, version = table.pull(0)
    assert (value.tolist(), version) == ([0.0] * 4, 0)
    with pytest.raises(CommError, match="state of 3 bytes"):
        decode_chunk_state(b"abc")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "cannot be read: KeyError"),
        ({"options": {"kind": "sgd"}, "roles": {"w": "BIG"}, "damped": False}, "KeyError"),
        ({"options": {"kind": "sdg"}, "roles": {}, "damped": False}, "sgd"),
        ({"options": {"kind": "sgd", "nesterov": True, "momentum": 0.0}, "roles": {}, "damped": False}, "look-ahead"),
        ({"options": 3, "roles": {}, "damped": False}, "AttributeError"),
    ],
)
def test_an_optimizer_is_options_that_are_checked(given, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ServerOptimizerSpec.from_json(given)
