"""Models of other people, cut by built-in and by own rules: every gradient is that of the whole model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from cut import compare, difference
from plan_edit import changed
from pool import Pool
from torch import Tensor, nn

from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.tensor.tp_validation import resolve_rules
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import ColwiseRowwise, EmbeddingRule, OutputRule, Rule

VOCAB, BATCH, TOKENS = 29, 2, 8


def build(kind: str, **changes: Any) -> nn.Module:
    if kind == "gpt":
        return tiny.model(vocab_size=VOCAB, num_heads=4, dim=32, **changes).double()
    import transformers

    torch.manual_seed(0)
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=TOKENS,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **changes,
        )  # fmt: skip
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    elif kind in ("bert", "roberta"):
        of = {"bert": "Bert", "roberta": "Roberta"}[kind]
        config = getattr(transformers, f"{of}Config")(
            intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **common, **changes
        )
        model = getattr(transformers, f"{of}ForMaskedLM")(config)
    else:
        of = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma"}[kind]
        config = getattr(transformers, f"{of}Config")(
            intermediate_size=48,
            **common,
            **{"num_key_value_heads": 2, "tie_word_embeddings": kind == "gemma", **changes},
        )
        model = getattr(transformers, f"{of}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros would hide one that is added twice
            nn.init.normal_(parameter, std=0.1)
    return model.double()


def loss_of(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=generator)
    logits = model(tokens[:, :-1]).logits
    logits = logits() if callable(logits) else logits  # a Head makes them when asked
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def cut(world: World, kind: str, changes: dict, options: dict) -> dict:
    return difference(world, build(kind, **changes), loss_of, **options)


SEQUENCE = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("ranks", "kind", "changes", "options"),
    [
        (2, "gpt", {"tied": False}, SEQUENCE),
        pytest.param(2, "llama", {"tie_word_embeddings": True}, {}, marks=pytest.mark.full),
        pytest.param(4, "llama", {"num_key_value_heads": 1, "pad_token_id": 3}, SEQUENCE, marks=pytest.mark.full),
        (4, "qwen2", {"num_key_value_heads": 2}, {}),
        pytest.param(2, "qwen2", {"tie_word_embeddings": True}, SEQUENCE, marks=pytest.mark.full),
        (2, "qwen3", {"num_key_value_heads": 1}, {}),
        pytest.param(2, "gpt2", {}, {}, marks=pytest.mark.full),
        (4, "gpt2", {}, {"tp": 2, "dp_shard": 2}),
        pytest.param(2, "gpt2", {}, SEQUENCE, marks=pytest.mark.full),
        pytest.param(4, "bert", {}, {}, marks=pytest.mark.full),
        (2, "bert", {}, SEQUENCE),
        pytest.param(2, "roberta", {}, {}, marks=pytest.mark.full),
        pytest.param(2, "gemma", {"head_dim": 8}, {}, marks=pytest.mark.full),
    ],
)
def test_every_gradient_is_that_of_the_whole_model(
    pool: Pool, ranks: int, kind: str, changes: dict, options: dict
) -> None:
    pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")
    outcomes = pool.run(cut, kind, changes, options, ranks=ranks)
    compare(outcomes)
    assert outcomes[0]["held"] < 0.8


class Inside(nn.Module):
    """A model of transformers under the names of the tiny run's batches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = build(kind).float()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens).logits


def of_logits(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten() % VOCAB, reduction="none")
    return (losses * batch["weights"].flatten()).sum(), batch["weights"].sum()


class FewTokens(tiny.RaggedTokens):
    """Of the small vocabulary, and as long as GPT-2's positions."""

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {name: each[:, :TOKENS] % VOCAB for name, each in super().read(indices).items()}


def trained(world: World, run_dir: str, kind: str, stop_after: int, axes: dict) -> list[tuple[float, float]]:
    found = []
    with tiny.trainer(
        run_dir, world=world, steps=4, network=Inside(kind), objective=of_logits, data=FewTokens(), **axes
    ) as run:
        for step in run:
            found.append((step.loss, float(step.stats[1])))
            if step.index == stop_after:
                break
    return found


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("bert", marks=pytest.mark.full)])
def test_trains_and_goes_on_under_another_plan(pool: Pool, tmp_path: Path, kind: str) -> None:
    """GPT-2's fused matrices are three blocks per rank, of which FSDP2 has a part again."""
    pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")
    alone = trained(World(JobSpec()), str(tmp_path / "alone"), kind, 4, {})
    first = pool.run(trained, str(tmp_path / "run"), kind, 2, {"tp": 2, "dp_shard": 2}, ranks=4)[0]
    then = pool.run(trained, str(tmp_path / "run"), kind, 3, {"tp": 2, "sequence_parallel": True}, ranks=2)[0]
    last = trained(World(JobSpec()), str(tmp_path / "run"), kind, 4, {})
    for found, expected in zip([*first, *then, *last], alone, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)


def plan_with(rules: tuple[Rule, ...], **options: Any) -> Plan:
    made = derive_plan(
        PlanOptions(device="cpu", tp=2, global_batch=2, **options), world_size=2, device="cpu", native_bf16=False
    )
    return changed(made, rules=rules)


class Scaled(nn.Embedding):
    """As Gemma has it."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 3


class Odd(nn.Module):
    """What no built-in rule knows: a pair with a bias and a norm inside, a table and an output under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Scaled(VOCAB, 8, padding_idx=5)
        self.steps = nn.ModuleList(nn.ModuleDict({"one": nn.Linear(8, 12), "two": nn.Linear(12, 8)}) for _ in range(2))
        self.last = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Any:
        x = self.words(tokens)
        for step in self.steps:
            x = x + step["two"](step["one"](x).relu())
        return SimpleNamespace(logits=self.last(x))


OWN: tuple[Rule, ...] = (
    ColwiseRowwise(module="steps.*", colwise=("one",), rowwise="two", input_module="one"),
    EmbeddingRule(module="words"),
    OutputRule(module="last"),
)


def own_rules(world: World) -> dict:
    torch.manual_seed(0)
    return difference(world, Odd().double(), loss_of, rules=OWN)


def test_rules_of_a_strategy_file(pool: Pool, tmp_path: Path) -> None:
    plan = plan_with(OWN)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.diff(plan_with(())) == {"tensor_parallel.rules": (plan.decisions()["tensor_parallel.rules"], [])}
    outcomes = pool.run(own_rules, ranks=2)
    compare(outcomes)
    assert outcomes[0]["held"] < 0.6


def test_an_unknown_field_of_a_rule_is_an_error() -> None:
    def data(rule: dict[str, Any]) -> dict[str, Any]:
        values = plan_with(()).to_json()
        return values | {"tensor_parallel": values["tensor_parallel"] | {"rules": [rule]}}

    with pytest.raises(PlanError, match="Object contains unknown field `columns`"):
        Plan.from_json(data({"rule": "colwise_rowwise", "module": "a", "rowwise": "b", "columns": ["c"]}))
    with pytest.raises(PlanError, match="Invalid value 'triple'"):
        Plan.from_json(data({"rule": "triple"}))


def problem(rules: tuple[Rule, ...], model: nn.Module | None = None, **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        resolve_rules(model or Odd(), plan_with(rules, **options))
    return str(caught.value)


def test_rules_that_cannot_be_followed() -> None:
    text = problem((EmbeddingRule(module="wrds"), ColwiseRowwise(module="steps.*", colwise=("onne",), rowwise="two")))
    assert "a rule for 'wrds'" in text
    assert "did you mean 'words'?" in text
    assert "a rule for 'steps.*' with onne" in text
    assert "did you mean 'one'?" in text
    text = problem((ColwiseRowwise(module="steps.*", colwise=("one",), rowwise="two", num_heads_attr="heads"),))
    assert "a rule for 'steps.*' with heads" in text
    text = problem((*OWN, ColwiseRowwise(module="steps.0", colwise=("one",), rowwise="two")))
    assert (
        "steps.0.one, which is named by the colwise_rowwise rule for 'steps.*' and by the colwise_rowwise rule for 'steps.0'"
        in text
    )
    assert "a layer is sharded in one way" in text
    tied = Odd()
    tied.last.weight = tied.words.weight
    text = problem((EmbeddingRule(module="words"),), tied)
    assert "words and last, which share a weight" in text
    assert "both uses of a parameter are sharded alike" in text
    text = problem(OWN, sequence_parallel=True)
    assert "sequence_parallel for Odd" in text
    assert "a rule says between which modules" in text
    bounded = Odd()
    bounded.words = nn.Embedding(VOCAB, 8, max_norm=1.0)
    assert "words, a Embedding, as vocabulary" in problem(OWN, bounded)
    text = problem(
        (
            ColwiseRowwise(module="steps.*", rowwise="two"),
            ColwiseRowwise(module="steps.*", colwise=("one",), rowwise="two", kv_group_size_attr="n"),
        )
    )
    assert "1. a pair for 'steps.*' with row 'two' alone\n" in text
    assert "2. a pair for 'steps.*' with kv_group_size_attr 'n'\n" in text
    narrow = Odd()
    narrow.steps[1] = nn.ModuleDict({"one": nn.Linear(8, 7), "two": nn.Linear(7, 8)})
    assert "plan.tp=2 for steps.1, whose width of two is 7" in problem(OWN, narrow)
    narrow.steps[1] = nn.ModuleDict({"first": nn.Linear(8, 12), "two": nn.Linear(12, 8)})
    text = problem(OWN, narrow)
    assert "a rule for 'steps.*' with one" in text
    assert "as in steps.1" in text


def test_halves_of_one_layer_are_not_cut_apart() -> None:
    """Of a gate and its values side by side, ranks in a row would have gates only."""
    gated = Odd()
    gated.steps[1] = nn.ModuleDict({"one": nn.Linear(8, 24), "two": nn.Linear(12, 8)})
    assert problem(OWN, gated) == (
        "steps.1.one, of 24 output features, before two, of 12 input features\n"
        "  rule: without num_heads_attr, colwise layers have as many outputs as the rowwise layer has inputs "
        "(fused ones three times)\n"
        "  so:   a rank would compute with features that do not belong together\n"
        "  try:  num_heads_attr, the attribute that counts heads; a gate and its values as two layers"
    )


def short(world: World) -> str:
    plan = plan_with((), sequence_parallel=True)
    model = parallelize(plan, build("gpt"), ParallelDims(plan, world)).model
    with pytest.raises(PlanError) as caught:
        model(torch.zeros(1, 7, dtype=torch.int64))
    return str(caught.value)


def test_a_sequence_that_cannot_be_cut_is_named(pool: Pool) -> None:
    text = pool.run(short, ranks=2)[0]
    assert "a batch with T = 7 tokens per sequence, with sequence_parallel and tp 2" in text
    assert "sequences of 8 tokens" in text
