"""A model built without its values gets those of a plain construction, bit for bit, and no process holds all of them."""

from __future__ import annotations

import ctypes
import pathlib
import weakref
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool
from torch import nn

from unisono.dist import World
from unisono.errors import CommError, PlanError
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.parallel.deferred_init import allocate_shards, deferred_init, materialize
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.train.initialize import initialize
from unisono.train.objectives import next_token

SIZES = {"num_layers": 2, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 49}


class Mixed(nn.Module):
    """Ways to initialise: from values, in several goes, by rejection, by QR, in part, from another's, and never."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(5, 3) * 0.1)
        self.cut = nn.Parameter(torch.zeros(20))
        nn.init.orthogonal_(self.scaled)
        nn.init.trunc_normal_(self.cut, std=0.02)
        nn.init.trunc_normal_(self.cut, std=1.0, a=-0.1, b=0.1)
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.register_buffer("mask", torch.ones(4, 4).tril())
        self.register_buffer("inverse", 1 / torch.arange(1, 5))
        self.other = nn.Parameter(torch.empty(4, 2, dtype=torch.bfloat16))
        nn.init.kaiming_uniform_(self.other)
        with torch.no_grad():
            self.cut[:3].normal_()
            self.scaled.mul_(torch.tensor(2.0)).add_(1)
            self.other[1].zero_()
        self.copied = nn.Parameter(self.scaled.detach().clone())
        nn.init.uniform_(self.scaled)
        self.tied = self.copied


def small_gpt() -> nn.Module:
    return GPT(ModelOptions(**SIZES))


def encoder() -> nn.Module:
    """torch copies the first layer."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12), 3, enable_nested_tensor=False)


def seeded_within() -> nn.Module:
    parts: list[nn.Module] = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        parts.append(nn.Linear(3, 4))
    torch.manual_seed(8)
    return nn.Sequential(*parts, nn.BatchNorm1d(4), nn.Embedding(5, 3, padding_idx=2))


def own_generator() -> nn.Module:
    layer = nn.Linear(3, 4)
    generator = torch.Generator().manual_seed(3)
    nn.init.normal_(layer.weight, generator=generator)
    nn.init.normal_(layer.bias, generator=generator)
    return layer


def converted() -> nn.Module:
    """Converted and moved while it is built, as peft does with the matrices of an adapter."""
    layer = nn.Linear(3, 4).to("cpu", dtype=torch.float64)
    nn.init.normal_(layer.bias)
    return nn.Sequential(layer.half(), nn.BatchNorm1d(4).to(torch.bfloat16), nn.Linear(4, 2).to("cpu"))


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("factory", [small_gpt, encoder, seeded_within, own_generator, converted, Mixed])
def test_values_are_those_of_a_plain_construction(factory: object) -> None:
    torch.manual_seed(1)
    plain = tensors(factory())
    after = torch.get_rng_state()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    recipe = deferred_init(factory)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.is_meta for parameter in recipe.model.parameters())
    torch.manual_seed(2)  # what others draw meanwhile does not matter
    allocate_shards(recipe.model, torch.device("cpu"))
    found = tensors(recipe.model)
    assert found.keys() == plain.keys()
    drawn = {name: value.clone() for name, value in recipe.values(found.keys())}
    for name, tensor in plain.items():
        assert torch.equal(drawn.get(name, found[name]), tensor), name
        assert found[name].dtype == tensor.dtype, name
        assert found[name].requires_grad == tensor.requires_grad, name
    assert torch.equal(after, torch.get_rng_state())
    some = set(list(plain)[1::2])
    assert all(name in some and torch.equal(value, plain[name]) for name, value in recipe.values(some))
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["Llama", "ViT"])
def test_models_of_transformers(kind: str) -> None:
    library = pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "Llama":
        config = library.LlamaConfig(**sizes, vocab_size=33, tie_word_embeddings=True)
        chosen = library.AutoModelForCausalLM
    else:
        config = library.ViTConfig(**sizes, image_size=8, patch_size=4)
        chosen = library.AutoModelForImageClassification
    test_values_are_those_of_a_plain_construction(lambda: chosen.from_config(config))


class Tied(nn.Module):
    """Two names for one matrix, outside of the repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(world: World, axes: dict, factory: object = small_gpt) -> list[str]:
    """Names of parameters that are not the block of the whole that a plain construction has."""
    plan = derive_plan(PlanOptions(device="cpu", **axes), world_size=world.world_size, device="cpu", native_bf16=False)
    torch.manual_seed(1)
    whole = tensors(factory())
    torch.manual_seed(1)
    recipe = deferred_init(factory)
    dims = ParallelDims(plan, world)
    parallel = parallelize(plan, recipe.model, dims)
    model, table = parallel.model, parallel.table
    allocate_shards(model, torch.device("cpu"))
    pieces = ShardedParameters(model, dims, table)
    materialize(recipe, model, pieces)
    assert len({recipe.fingerprint, *world.all_gather_json(recipe.fingerprint)}) == 1
    wrong = []
    for name, piece in pieces.parameters.items():
        part, mine = pieces.shard_of(name, piece), whole[name]
        for dim, begin in enumerate(part.offset if part else ()):
            mine = mine.narrow(dim, begin, piece.shape[dim])
        if not torch.equal(mine, piece):
            wrong.append(name)
    tokens = torch.arange(6).view(2, 3)
    torch.manual_seed(1)
    mine, theirs = model(tokens), factory()(tokens)
    torch.testing.assert_close(getattr(mine, "hidden", mine), getattr(theirs, "hidden", theirs))
    return wrong


def tied(world: World) -> list[str]:
    assert len(dict(deferred_init(Tied).model.named_parameters())) == 5
    return built(world, {"dp_shard": 2}, Tied)


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        pytest.param(2, {"dp_shard": 2}, marks=pytest.mark.full),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.full),
        (4, {"dp_shard": 2, "tp": 2}),
    ],
)
def test_a_rank_gets_its_blocks(pool: Pool, ranks: int, axes: dict) -> None:
    assert pool.run(built, axes, ranks=ranks) == [[]] * ranks


def ruled(world: World) -> list[str]:
    def by_rules() -> nn.Module:
        rules = [{"match": "blocks.0.*", "kind": "orthogonal"}, {"match": "*", "kind": "xavier", "magnitude": 2.34}]
        return initialize(small_gpt(), rules, seed=4)

    return built(world, {"dp_shard": 2, "tp": 2}, by_rules)


@pytest.mark.full
def test_initial_values_by_rules_are_those_of_the_whole_model(pool: Pool) -> None:
    assert pool.run(ruled, ranks=4) == [[]] * 4


def test_tied_parameters_stay_tied(pool: Pool) -> None:
    assert pool.run(tied, ranks=2) == [[]] * 2


def risen(world: World, folder: str, defer: bool) -> float:
    """How far the memory of this process rose until a trainer could begin, over the bytes of the model."""

    def large() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Linear(1024, 1024, bias=False) for _ in range(48))
        )  # large, so that what the allocator keeps is a small part

    def memory(line: str) -> int:
        (found,) = [
            each for each in pathlib.Path("/proc/self/status").read_text().splitlines() if each.startswith(line)
        ]
        return int(found.split()[1]) << 10

    settings = {"world": world, "steps": 1, "dp_shard": 2, "kind": "sgd", "momentum": 0.0, "lr": 0.1}
    with tiny.trainer(f"{folder}/first-{defer}", **settings):  # imports what it needs
        pass
    # what tests before this one freed goes back to the system: memory taken from it would not let the process grow
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
    before = memory("VmRSS")
    with tiny.trainer(f"{folder}/{defer}", network=large if defer else large(), **settings):
        return (memory("VmHWM") - before) / (48 << 22)


def test_no_process_holds_all(pool: Pool, tmp_path: pathlib.Path) -> None:
    assert max(pool.run(risen, str(tmp_path), True, ranks=2)) < 0.75
    assert min(pool.run(risen, str(tmp_path), False, ranks=2)) > 0.9


def built_before(world: World, folder: str) -> tuple[str, str, str]:
    """What a run says that is given a callable the recorder refuses, and what one starts with that returns a module."""
    settings = {"world": world, "steps": 1, "dp_shard": 2}

    def peeks() -> nn.Module:
        model = tiny.model()
        model.scale = model.norm.weight.max().item()  # type: ignore[assignment]
        return model

    try:
        with tiny.trainer(f"{folder}/refused", network=peeks, **settings):
            said = ""
    except PlanError as error:
        said = str(error)
    made = peeks()
    with tiny.trainer(f"{folder}/module", network=made, **settings) as run:
        plain = tiny.digest(run)
    again = peeks()
    with tiny.trainer(f"{folder}/callable", network=lambda: again, **settings) as run:
        return said, plain, tiny.digest(run)


def test_a_model_that_cannot_be_deferred_may_be_built_before(pool: Pool, tmp_path: pathlib.Path) -> None:
    for said, plain, returned in pool.run(built_before, str(tmp_path), ranks=2):
        assert "  try:  give the trainer (or return from components.model) a module that was built before" in said
        assert plain == returned


def differs(world: World, folder: str) -> str:
    def other() -> nn.Module:
        torch.manual_seed(world.rank)
        return nn.Linear(2, 2)

    try:
        with tiny.trainer(folder, network=other, world=world, steps=1, dp_shard=2):
            return ""
    except CommError as error:
        return str(error)


def test_ranks_agree_on_how_values_are_made(pool: Pool, tmp_path: pathlib.Path) -> None:
    for said in pool.run(differs, str(tmp_path), ranks=2):
        assert "model is the same on all 2 ranks" in said


NETWORKS = {
    "gpt": lambda: tiny.model(num_layers=4, num_heads=4, num_kv_heads=1, vocab_size=49),
    "tied": lambda: tiny.model(num_layers=4, num_heads=4, num_kv_heads=2, tied=True),
    "experts": lambda: tiny.model(
        num_layers=2, num_heads=4, num_experts=4, num_experts_per_token=2, ffn_dim=16, balance="bias"
    ),
    "gpt2": lambda: gpt2(),
}


def gpt2() -> nn.Module:
    """Query, key and value lie side by side in one matrix, which tp cuts into three runs."""
    library = pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": tiny.SEQ_LEN, "vocab_size": 49}
    config = library.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return library.AutoModelForCausalLM.from_config(config)


def logits_loss(outputs: Any, batch: Any) -> Any:
    if not hasattr(outputs, "logits") or isinstance(outputs, tuple):
        return next_token(outputs, batch)
    losses = F.cross_entropy(outputs.logits.mT, batch["targets"], reduction="none")
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def renamed(sample: dict, _rng: object) -> dict:
    return {**sample, "input_ids": sample["tokens"]}


def through_the_trainer(world: World, folder: str, name: str, changes: dict) -> tuple[list[str], list[str]]:
    """Digests of everything this rank holds at the start and after two steps: from a module, and from a callable."""
    outcomes: list[tuple[str, str]] = []
    for given in (NETWORKS[name](), NETWORKS[name]):
        run_dir = f"{folder}/{len(outcomes)}"
        settings = {"steps": 2, "global_batch": 8, "micro_batch": 2, "ema_decay": 0.9, "transform": renamed, **changes}
        with tiny.trainer(run_dir, world=world, network=given, objective=logits_loss, **settings) as run:
            started = tiny.digest(run)
            list(run)
            outcomes.append((started, tiny.digest(run)))
        torch.manual_seed(world.rank)
    return tuple(zip(*outcomes, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("tied", 2, {"pp": 2}),
        *(
            pytest.param(name, ranks, changes, marks=pytest.mark.full)
            for name, ranks, changes in (
                ("gpt", 1, {}),
                ("gpt", 2, {}),
                ("gpt", 4, {"dp_shard": 2, "tp": 2}),
                ("gpt", 2, {"dp_shard": 2, "zero": 1}),
                ("gpt", 2, {"tp": 2, "sequence_parallel": True}),
                ("gpt", 2, {"cp": 2, "fsdp.shard_threshold_numel": 100}),
                ("tied", 2, {"tp": 2}),
                ("tied", 4, {"pp": 2, "dp_shard": 2, "schedule": "interleaved"}),
                ("gpt", 8, {"pp": 2, "dp_shard": 2, "tp": 2}),
                ("experts", 2, {"dp_shard": 2, "ep": 2}),
                ("experts", 4, {"dp_shard": 4}),
                ("experts", 4, {"pp": 2, "dp_shard": 2, "ep": 2}),
                ("gpt2", 2, {"tp": 2}),
                ("gpt2", 4, {"tp": 2, "dp_shard": 2}),
            )
        ),
    ],
)
def test_a_trainer_begins_with_the_same_values(
    pool: Pool, tmp_path: pathlib.Path, name: str, ranks: int, changes: dict
) -> None:
    for started, ended in pool.run(through_the_trainer, str(tmp_path), name, changes, ranks=ranks, timeout_s=120):
        assert started[0] == started[1]
        assert ended[0] == ended[1]


def reads_a_value() -> nn.Module:
    layer = nn.Linear(2, 3)
    layer.scale = layer.weight.abs().max().item()  # type: ignore[assignment]
    return layer


def plain_attribute() -> nn.Module:
    layer = nn.Linear(2, 3)
    layer.table = torch.zeros(4)
    return layer


def put_back() -> nn.Module:
    layer = nn.Linear(2, 3)
    with torch.random.fork_rng():
        nn.init.normal_(layer.weight)
    return nn.Sequential(layer, nn.Linear(2, 3))


def draws_into_values() -> nn.Module:
    layer = nn.Linear(2, 3)
    layer.extra = nn.Parameter(torch.tensor([1.0, 2.0]).normal_())
    return layer


def elsewhere() -> nn.Module:
    return nn.Linear(2, 3, device="meta")


def referenced() -> nn.Module:
    layer = nn.Linear(2, 3)
    layer.source = weakref.ref(layer.weight)
    return layer.half()


@pytest.mark.parametrize(
    ("factory", "given", "rule"),
    [
        (referenced, "module.to() while", "only while nothing holds a weak reference to its parameters"),
        (reads_a_value, "_local_scalar_dense of [] torch.float32", "it needs values, and there are none yet"),
        (plain_attribute, "table of [4] torch.float32", "is a parameter or a registered buffer"),
        (put_back, "set_state while", "is not put back to where it was between two draws"),
        (draws_into_values, "normal_ of [2] torch.float32", "made with its values is not drawn or computed into"),
        (elsewhere, "empty while", "values are drawn on the CPU, not on meta"),
    ],
)
def test_what_cannot_be_deferred_is_refused(factory: object, given: str, rule: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(PlanError) as raised:
        deferred_init(factory)
    assert str(raised.value).startswith(given)
    assert rule in str(raised.value)
    assert "while a model is built without its values" in str(raised.value)
    assert torch.equal(before, torch.get_rng_state())
    assert not nn.Linear(2, 3).weight.is_meta


def test_a_source_that_changed_is_refused() -> None:
    source = torch.ones(3, 2)

    def factory() -> nn.Module:
        layer = nn.Linear(2, 3)
        with torch.no_grad():
            layer.weight.copy_(source)
        return layer

    recipe = deferred_init(factory)
    assert recipe.fingerprint == deferred_init(factory).fingerprint
    (found,) = (value.clone() for _, value in recipe.values({"weight"}))
    assert torch.equal(found, source)
    source.add_(1)
    assert recipe.fingerprint != deferred_init(factory).fingerprint
    with pytest.raises(PlanError, match="what it reads has been changed since"):
        list(recipe.values({"weight"}))
