"""Context parallelism: attention over cut sequences, and whole models, are those of one process; what cannot be is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import matrix
import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.dist import World
from unisono.errors import PlanError, UnisonoError
from unisono.models.bert import BERT, BertOptions
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.parallel.context import ContextParallel
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.sharding import ShardedParameters
from unisono.parallel.transforms import TRANSFORMS, parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.train.objectives import masked_token, next_token

B, T, VOCAB = 2, 24, 48


def dims_of(world: World, **axes: Any) -> ParallelDims:
    options = PlanOptions(**{"device": "cpu", "precision": "fp32", "global_batch": 4, **axes})
    return ParallelDims(derive_plan(options, world_size=world.world_size, device="cpu", native_bf16=False), world)


def documents() -> Tensor:
    """Borders inside runs and at their ends, others in each sample."""
    return torch.stack([torch.arange(T) // 5, (torch.arange(T) >= 12).long()])


def near(found: Tensor | np.ndarray, expected: Tensor, what: str) -> None:
    found, expected = torch.as_tensor(found).detach(), expected.detach()
    difference = float((found - expected).norm() / expected.norm())
    assert difference < 1e-5, f"{what}: {difference}"


# --- attention alone -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Projections around one call of attention, as ``case`` says."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.q, self.k, self.v = (nn.Linear(16, width, bias=False) for width in (16, 8 if "gqa" in case else 16, 8))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = 2 if "gqa" in self.case else 4
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)  # [B, 4, T, 4]
        k = self.k(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        arguments: dict[str, Any] = {"enable_gqa": True} if "gqa" in self.case else {}
        if "scale" in self.case:
            arguments["scale"] = 0.9
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal="causal" in self.case and mask is None, **arguments
        )
        return mixed.transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, self.blocks = case, nn.ModuleList([Attention(case)])

    def forward(self, tokens: Tensor, padding: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """tokens [B, T, 16], taken as they are."""
        mask = None
        if "padding" in self.case:
            assert padding is not None
            mask = padding[:, None, None]
            if "float" in self.case:
                mask = torch.where(mask, 0.0, -torch.inf).to(tokens.dtype)
        if documents is not None:
            mask = documents[:, None, :, None] == documents[:, None, None]
            mask = mask.tril() if "causal" in self.case else mask
        return self.blocks[0](tokens, mask)


def attention_batch(case: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    batch = {
        "tokens": torch.randn(B, T, 16, generator=generator, dtype=torch.float64),
        "padding": torch.arange(T) < torch.tensor([[T], [T - 7]]),
        "upstream": torch.randn(B, T, 8 if "gqa" not in case else 16, generator=generator, dtype=torch.float64),
    }
    return batch | ({"documents": documents()} if "documents" in case else {})


def attention(batch: dict[str, Tensor], context: ContextParallel | None, model: Stack) -> tuple[Tensor, list[Tensor]]:
    tokens = batch["tokens"].clone().requires_grad_()
    whole = batch | {"tokens": tokens}
    with context.micro_batch(whole) if context else nullcontext():
        part = context.shard_batch(whole) if context else whole
        upstream = part.pop("upstream")
        outputs = model(**part)
        (outputs * upstream).sum().backward()
    assert tokens.grad is not None
    return outputs.detach(), [tokens.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


ATTENTIONS = ["causal", "full", "causal gqa scale", "causal documents", "documents", "padding", "padding float gqa"]


def attentions(world: World, cases: list[str]) -> dict[str, tuple[np.ndarray, list[np.ndarray]]]:
    dims = dims_of(world, cp=world.world_size)
    found = {}
    for case in cases:
        model = Stack(case).double()
        context = ContextParallel(dims, model)
        context.wrap_blocks(model.blocks)
        outputs, gradients = attention(attention_batch(case), context, model)
        found[case] = (outputs.numpy(), [dims.sum(gradient, "cp").numpy() for gradient in gradients])
    return found


def joined(parts: list[np.ndarray]) -> Tensor:
    """[B, T, ...] of the ranks' parts, by the two runs of each."""
    halves = [torch.as_tensor(part).chunk(2, dim=1) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim=1)


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_attention_alone(pool: Pool, ranks: int) -> None:
    found = pool.run(attentions, ATTENTIONS, ranks=ranks)
    for case in ATTENTIONS:
        outputs, gradients = attention(attention_batch(case), None, Stack(case).double())
        near(joined([rank[case][0] for rank in found]), outputs, case)
        for mine, expected in zip(found[0][case][1], gradients, strict=True):
            near(mine, expected, f"gradient, {case}")


# --- GPT whole -------------------------------------------------------------------------------------------------------


def gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_size": VOCAB, "dropout": dropout}
    return GPT(ModelOptions(**sizes)).double()


def tokens_batch(*, packed: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (B, T + 1), generator=generator)
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": (torch.arange(T) < torch.tensor([[T], [T - 5]])).float(),
    }
    if packed:
        number = documents()
        starts = number.diff(dim=1, prepend=number[:, :1] - 1) != 0
        places = torch.arange(T)
        batch |= {"documents": number, "positions": places - torch.where(starts, places, 0).cummax(1).values}
    return batch


def loss_of(model: GPT, packed: bool, context: ContextParallel | None = None) -> Tensor:
    micro = tokens_batch(packed=packed)
    with context.micro_batch(micro) if context else nullcontext():
        part = context.shard_batch(micro) if context else micro
        head = model(**{name: part[name] for name in ("tokens", "positions", "documents") if name in part})
        loss, _ = next_token(head, part)
        loss.backward()
    return loss.detach()


def gpts(world: World, axes: dict[str, Any], cases: list[tuple[str, bool]], dropout: float = 0.0) -> list[dict]:
    """For each (recompute, packed): the loss summed over cp, and this rank's blocks of the gradients with their offsets."""
    found = []
    for recompute, packed in cases:
        dims = dims_of(world, recompute=recompute, **axes)
        model = gpt(dropout)
        context = ContextParallel(dims, model)
        pieces = ShardedParameters(model, dims, parallelize(dims.plan, model, dims, context).table)
        torch.manual_seed(1)
        loss = dims.sum(loss_of(model, packed, context), "cp")
        pieces.collect_grads()
        blocks = {}
        for name, piece in pieces.parameters.items():
            part = pieces.shard_of(name, piece.grad)
            blocks[name] = (part.offset if part else (0,) * piece.ndim, piece.grad.clone().numpy())
        found.append({"loss": float(loss), "blocks": blocks})
    return found


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (3, {"cp": 3, "global_batch": 3}),
        (4, {"cp": 2, "tp": 2}),
        pytest.param(2, {"cp": 2}, marks=pytest.mark.full),
        pytest.param(4, {"cp": 2, "dp_shard": 2}, marks=pytest.mark.full),
    ],
)
def test_gpt_whole(pool: Pool, ranks: int, axes: dict[str, Any]) -> None:
    """Both samples are on every rank of dp_shard, so its sums are twice those of one process."""
    cases = [("none", False), ("none", True), ("full", True), ("selective", False)]
    outcomes = pool.run(gpts, axes, cases, ranks=ranks)
    for number, (recompute, packed) in enumerate(cases):
        model = gpt()
        loss = loss_of(model, packed)
        for rank in outcomes:
            assert rank[number]["loss"] == pytest.approx(float(loss), rel=1e-6), (recompute, packed)
            for name, (offset, block) in rank[number]["blocks"].items():
                whole = model.get_parameter(name).grad * axes.get("dp_shard", 1)
                where = tuple(slice(start, start + size) for start, size in zip(offset, block.shape, strict=True))
                near(block, whole[where], f"{name}, recompute {recompute}, packed {packed}")


def test_recompute_changes_no_bit(pool: Pool) -> None:
    cases = [(recompute, packed) for packed in (False, True) for recompute in ("none", "full", "selective")]
    for rank in pool.run(gpts, {"cp": 2}, cases, 0.1, ranks=2):
        for first in (0, 3):
            for again in rank[first + 1 : first + 3]:
                assert again["loss"] == rank[first]["loss"]
                for name, (_, block) in again["blocks"].items():
                    assert np.array_equal(block, rank[first]["blocks"][name][1]), name


# --- transformers ----------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "qwen2": ("Qwen2", {**LLAMA, "use_cache": False}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 7, "use_cache": False}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_layer": 2, "n_head": 4, "n_embd": 16, "use_cache": False}),
    "bert": ("Bert", {**SIZES, "intermediate_size": 32}),
}
HEADS = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}


def of_transformers(name: str) -> Any:
    import transformers

    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="sdpa")
    for dropout in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(config, dropout, 0.0)
    torch.manual_seed(0)
    return getattr(transformers, HEADS.get(family, f"{family}ForCausalLM"))(config).double().train()


def transformers_batch(kind: str) -> dict[str, Tensor]:
    batch = tokens_batch(packed=True)
    batch["input_ids"] = batch.pop("tokens")
    positions = batch.pop("positions")
    if kind == "packed":
        batch["position_ids"] = positions
    if kind == "padded":
        batch["attention_mask"] = (torch.arange(T) < torch.tensor([[T], [T - 5]])).long()
    return batch


def loss_of_logits(model: nn.Module, batch: dict[str, Tensor], context: ContextParallel | None = None) -> Tensor:
    with context.micro_batch(batch) if context else nullcontext():
        part = context.shard_batch(batch) if context else batch
        names = ("input_ids", "position_ids", "attention_mask")
        logits = model(**{name: part[name] for name in names if name in part}).logits
        losses = F.cross_entropy(logits.flatten(0, 1), part["targets"].flatten(), reduction="none")
        loss = (losses * part["weights"].flatten()).sum()
        loss.backward()
    return loss.detach()


# the sequences that a model was given, and what its masks must then be
TRANSFORMERS = [
    *[("llama", kind) for kind in ("plain", "padded", "packed")],
    *[("qwen2", kind) for kind in ("plain", "packed")],
    *[("mistral", kind) for kind in ("plain", "padded", "packed")],
    *[("gpt2", kind) for kind in ("plain", "padded", "packed")],
    *[("bert", kind) for kind in ("plain", "padded")],
]


def in_transformers(world: World, recompute: str) -> int:
    compared = 0
    for name, kind in TRANSFORMERS:
        batch = transformers_batch(kind)
        alone, model = of_transformers(name), of_transformers(name)
        if recompute != "none":  # a cache would get a block's keys twice
            alone.config.use_cache = model.config.use_cache = False
        dims = dims_of(world, cp=world.world_size, recompute=recompute)
        context = ContextParallel(dims, model)
        parallelize(dims.plan, model, dims, context, transforms=[each for each in TRANSFORMS if each.name != "fsdp"])
        loss = dims.sum(loss_of_logits(model, batch, context), "cp")
        assert float(loss) == pytest.approx(float(loss_of_logits(alone, batch)), rel=1e-6), (name, kind)
        for parameter, mine in alone.named_parameters():
            assert mine.grad is not None
            if mine.grad.norm() > 1e-12:  # a key's bias moves nothing
                near(dims.sum(model.get_parameter(parameter).grad, "cp"), mine.grad, f"{name}, {kind}: {parameter}")
                compared += 1
    return compared


@pytest.mark.parametrize(
    ("ranks", "recompute"),
    [(2, "none"), *(pytest.param(*case, marks=pytest.mark.full) for case in [(3, "none"), (2, "full")])],
)
def test_transformers(pool: Pool, ranks: int, recompute: str) -> None:
    """Their masks, too, are of the whole sequence: causal, windows, padding, samples packed by position_ids, none."""
    pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")
    assert min(pool.run(in_transformers, recompute, ranks=ranks, timeout_s=120)) > 200


# --- what each rank computes, and what is refused ---------------------------------------------------------------------


class Pairs(TorchDispatchMode):
    """Counts pairs of query and key that attention kernels are given."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.count += args[0].shape[-2] * args[1].shape[-2]
        return func(*args, **(kwargs or {}))


def pairs(world: World) -> int:
    dims = dims_of(world, cp=world.world_size)
    model = gpt()
    context = ContextParallel(dims, model)
    context.wrap_blocks(model.blocks)
    with Pairs() as counted:
        loss_of(model, False, context)
    return counted.count


def test_ranks_compute_equally_many_pairs(pool: Pool) -> None:
    """Of 6 runs of 4 tokens, each of 3 ranks looks at 7 squares of 16 pairs in either block; without order it would be 12."""
    assert pool.run(pairs, ranks=3) == [2 * 7 * 16] * 3


class Masked(Stack):
    """Makes its mask of what it is given, and of another shape if asked."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None, rows: int = 0) -> Tensor:  # type: ignore[override]
        size = tokens.shape[1]
        return self.blocks[0](tokens, torch.ones(size, size, dtype=torch.bool).tril() if mask is None else mask)


def whole_masks(world: World) -> list[float]:
    """Masks that are in the batch are cut where they are needed."""
    dims = dims_of(world, cp=2)
    model = Masked("full").double()
    tokens = torch.randn(B, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = (torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(2)) > 0.5) | torch.eye(T, dtype=torch.bool)
    expected = model(tokens, mask)
    context = ContextParallel(dims, model)
    context.wrap_blocks(model.blocks)
    found = []
    for batch in ({"tokens": tokens, "mask": mask}, {"tokens": tokens, "mask": mask.float().log().double()}):
        with context.micro_batch(batch):
            outputs = model(**context.shard_batch(batch))
        mine = expected.view(B, 4, -1, 8)[:, [0, 3] if world.rank == 0 else [1, 2]].flatten(1, 2)
        near(outputs, mine, "a whole mask")
        found.append(outputs.shape[1])
    return found


def test_a_whole_mask_in_the_batch(pool: Pool) -> None:
    assert pool.run(whole_masks, ranks=2) == [[T // 2] * 2] * 2


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens, tokens, tokens)[0]
        return tokens


class Crossed(Stack):
    """Looks at its first token only."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return self.blocks[0](tokens)


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x[:, :1], x[:, :1])


def refusals(world: World) -> dict[str, str]:
    dims = dims_of(world, cp=2)
    tokens = torch.randn(B, T, 16)
    crossed = Crossed("full")
    crossed.blocks = nn.ModuleList([Narrow()])
    cases: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "length": (Stack("causal"), {"tokens": torch.randn(B, 22, 16), "weights": torch.ones(B)}),
        "nothing": (Stack("causal"), {"numbers": torch.ones(B)}),
        "mask": (Masked("causal"), {"tokens": tokens}),
        "own products": (Eager(), {"tokens": tokens}),
        "first": (crossed, {"tokens": tokens}),
        "nested": (Stack("causal"), {"tokens": tokens, "image": {"pixels": torch.ones(B, 3)}}),
    }
    found = {}
    for name, (model, batch) in cases.items():
        context = ContextParallel(dims, model)
        context.wrap_blocks(model.blocks)  # type: ignore[arg-type]
        with pytest.raises(PlanError) as caught, context.micro_batch(batch):
            model(**context.shard_batch(batch))
        found[name] = str(caught.value)
    with pytest.raises(PlanError) as caught:
        parallelize(dims.plan, nn.Linear(2, 2), dims, context)
    found["no blocks"] = str(caught.value)
    return found


def test_what_cannot_be_is_refused(pool: Pool) -> None:
    texts = pool.run(refusals, ranks=2)[0]
    assert texts["length"] == (
        "plan.cp=2 for a batch of tokens [2, 22, 16], weights [2]\n"
        "  rule: dim 1 is the sequence, which is cut into 4 equal runs\n"
        "  so:   22 tokens cannot be shared equally\n"
        "  try:  sequences of 20 or sequences of 24, or plan.cp=1"
    )
    assert "0 tokens cannot be shared" in texts["nothing"]
    assert texts["nested"] == (
        "plan.cp=2 for a batch whose entry 'image' is a dict\n"
        "  rule: the ranks of cp share sequences, which are tensors [B, T, …] of the batch itself\n"
        "  so:   it is not known which of its parts are sequences\n"
        "  try:  a collate_fn or transform that gives its tensors as entries of the batch, or plan.cp=1 (dp_shard shares the "
        "state as well)"
    )
    assert "sequences of 4" in texts["nothing"]
    assert "an attention mask [12, 12] under plan.cp=2, with sequences of 24" in texts["mask"]
    assert "a whole mask [B, 1, T, T] in the batch" in texts["mask"]
    assert (
        "plan.cp=2 for MultiheadAttention, which does not call F.scaled_dot_product_attention" in texts["own products"]
    )
    assert "attention of 12 queries with 1 keys under plan.cp=2" in texts["first"]
    assert "plan.cp=2 for Linear" in texts["no blocks"]


def transformers_refusals(world: World) -> dict[str, str]:
    dims = dims_of(world, cp=2)
    model = of_transformers("llama")
    context = ContextParallel(dims, model)
    context.wrap_blocks(model.model.layers)
    found = {}
    batch = transformers_batch("plain")
    with pytest.raises(PlanError) as caught:
        context.shard_batch(batch | {"labels": batch["targets"]})
    found["labels"] = str(caught.value)
    before = model(input_ids=batch["input_ids"]).logits
    near(
        before,
        of_transformers("llama")(input_ids=batch["input_ids"]).logits,
        "whole sequences outside of a micro-batch",
    )
    model = of_transformers("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(PlanError) as caught:
        ContextParallel(dims, model)
    found["eager"] = str(caught.value)
    return found


def test_what_transformers_cannot_be_asked(pool: Pool) -> None:
    pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")
    texts = pool.run(transformers_refusals, ranks=2, timeout_s=120)[0]
    assert "labels for LlamaForCausalLM" in texts["labels"]
    assert "shifted targets under another name" in texts["labels"]
    assert "LlamaForCausalLM with attention 'eager'" in texts["eager"]
    assert "model.set_attn_implementation('sdpa')" in texts["eager"]


class Tokens:
    """Texts of twelve tokens."""

    fingerprint = "twelve-1"

    def __len__(self) -> int:
        return tiny.SAMPLES

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = np.full((len(indices), 12), 7)
        return {"tokens": tokens, "targets": tokens, "weights": np.ones(tokens.shape, np.float32)}


def entered(world: World, folder: str) -> dict[str, str]:
    """What a trainer says on entering, by model; twelve tokens on two ranks are six on each, for a table of eight."""
    bert = BERT(BertOptions(vocab_size=VOCAB, num_layers=2, dim=16, num_heads=4, ffn_dim=32, max_length=8))
    cases: dict[str, tuple[nn.Module, Any, Any]] = {
        "resnet": matrix.MODELS["resnet"](4),
        "bert": (bert, Tokens(), masked_token),
    }
    found = {}
    for name, (network, data, objective) in cases.items():
        run = tiny.trainer(
            f"{folder}/{name}", world=world, network=network, data=data, objective=objective, micro_batch=4, cp=2
        )
        with pytest.raises(UnisonoError) as caught:
            run.__enter__()
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    return found


def test_what_has_no_sequence_or_too_long_ones_is_refused_before_a_step(pool: Pool, tmp_path: Path) -> None:
    for texts in pool.run(entered, str(tmp_path), ranks=2):
        assert texts["resnet"] == (
            "PlanError: plan.cp=2 for a batch of image [4, 3, 16, 16], targets [4], weights [4]\n"
            "  rule: the ranks of cp share sequences: a batch has tokens [B, T], and targets and weights of every token\n"
            "  so:   nothing here is a sequence: each rank would count whole samples\n"
            "  try:  plan.cp=1 (dp_shard shares the state as well)"
        )
        assert texts["bert"] == (
            "DataError: texts of 12 tokens for a model of max_length 8\n"
            "  rule: every place in a text has a learned position\n"
            "  so:   the last tokens would have none\n"
            "  try:  texts of 8 tokens, or max_length=12"
        )
