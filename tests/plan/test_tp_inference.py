"""What is inferred: for known models the pairs of their built-in sets, for others reasons where there are none."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from msgspec.structs import replace
from stacks import TOKENS, VOCAB, Stack
from torch import Tensor, nn

from unisono.models.bert import BERT, BertOptions
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import BUILT_IN_RULES, ColwiseRowwise, EmbeddingRule, OutputRule
from unisono.plan.rules import built_in_rules as built_in_rules
from unisono.plan.tp_inference import infer_rules
from unisono.train.setup import infer_tp_rules

BATCH = torch.zeros(2, TOKENS, dtype=torch.long)


def pairs(rules: Any) -> list[ColwiseRowwise]:
    return [rule for rule in rules if isinstance(rule, ColwiseRowwise)]


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_gpt_gets_the_pairs_of_its_set(kv_heads: int) -> None:
    model = tiny.model(num_heads=4, num_kv_heads=kv_heads, dim=32)
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    found = infer_rules(model, {"tokens": BATCH})
    assert pairs(found.rules) == pairs(BUILT_IN_RULES["unisono gpt"])
    assert found.replicated == {"embedding": "its table is used for more than looking up"}
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    assert (model.blocks[0].attention.heads, model.blocks[0].ffn.up.out_features) == (
        4,
        before["blocks.0.ffn.up.weight"][1][0],
    )


def test_heads_that_are_counted_twice_are_told_twice() -> None:
    """With as many key/value heads as query heads nothing tells them apart but what the forward pass does with the numbers."""
    (attention, _) = pairs(infer_rules(tiny.model(num_heads=4, num_kv_heads=4, dim=32), {"tokens": BATCH}).rules)
    assert (attention.num_heads_attr, attention.size_attrs) == ("heads", ("kv_heads",))


def test_a_bert_gets_the_pairs_of_its_set() -> None:
    options = BertOptions(vocab_size=VOCAB, num_layers=2, dim=32, num_heads=4, ffn_dim=48, max_length=16)
    found = infer_rules(BERT(options), {"tokens": BATCH})
    assert pairs(found.rules) == pairs(BUILT_IN_RULES["unisono bert"])
    assert found.replicated["head.dense"] == "its result goes through layer_norm along the sharded dim"
    assert found.replicated["positions"] == "what is looked up in it is no entry of the batch"


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_models_of_transformers_get_the_rules_of_their_set(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' is not installed")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "intermediate_size": 48,
    }
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **sizes))
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    found = [
        rule
        for rule in infer_rules(model, {"input_ids": BATCH}).rules
        if isinstance(rule, (ColwiseRowwise, EmbeddingRule, OutputRule))
    ]
    names = [name for name, _ in model.named_modules()]
    built_in = [rule for rule in built_in_rules(names) if isinstance(rule, (ColwiseRowwise, EmbeddingRule, OutputRule))]
    root = "bert." if kind == "bert" else "model."
    # sizes that older versions of transformers read in a forward pass
    built_in = [replace(rule, size_attrs=()) if isinstance(rule, ColwiseRowwise) else rule for rule in built_in]
    assert [replace(r, module=r.module.removeprefix(root)) for r in found] == [
        replace(r, module=r.module.removeprefix("**.")) for r in built_in
    ]


def test_layers_are_entered_one_by_one_where_no_module_holds_them() -> None:
    attention, wide, *_ = infer_rules(Stack("parallel"), {"tokens": BATCH}).rules
    assert attention == ColwiseRowwise(
        module="blocks.*",
        colwise=("q", "k", "v"),
        rowwise="proj",
        num_heads_attr="n_head",
        size_attrs=("n_embd",),
        input_module="*",
    )
    assert wide == ColwiseRowwise(module="blocks.*", colwise=("wide",), rowwise="narrow", input_module="wide")
    (fused, *_) = infer_rules(Stack("decoder"), {"tokens": BATCH}).rules
    assert fused == ColwiseRowwise(module="blocks.*.own", fused_colwise=("qkv",), rowwise="out", num_heads_attr="heads")


class Refusing(nn.Module):
    """Layers that cannot be sharded, each for its own reason."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.positions = nn.Conv1d(8, 8, 1), nn.Parameter(torch.zeros(4, 8))
        self.halves, self.after = nn.Linear(8, 12), nn.Linear(6, 8)
        self.plain, self.added = nn.Linear(8, 8), nn.Linear(8, 8)
        self.twice, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.counted = Counted()
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2) + self.positions
        first, second = self.halves(x).split([4, 8], dim=-1)
        x = x + self.after(torch.cat([first, second[..., :2]], -1))
        x = x + self.added(x + self.plain(x).relu())
        hidden = self.twice(x).relu()
        x = self.one(hidden).relu() + self.other(hidden).relu()
        return self.last(self.counted(nn.functional.layer_norm(x, (8,))))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.inside(x).unflatten(-1, (4, 2)).tanh().flatten(2))


def test_what_is_left_has_a_reason() -> None:
    found = infer_rules(Refusing(), {"x": torch.zeros(2, 4, 8)})
    assert found.rules == ()
    left = found.replicated
    assert left["conv"] == "there is no rule for Conv1d"
    assert left["positions"] == "it is a parameter of the model itself"
    assert left["halves"] == "its result is split unevenly"
    assert left["added"] == "its result meets a value that is not sharded and has a size above 1 along the sharded dim"
    assert left["twice"] == "its result goes into other and one: a pair ends in one layer"
    assert left["plain"] == left["added"]
    assert left["counted.inside"] == "no attribute of Counted holds its number of heads, 4"
    assert left["last"] == "its result is what the model returns"


class Events:
    """An event log that keeps what is emitted."""

    def __init__(self) -> None:
        self.emitted: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.emitted.append((kind, fields))


@pytest.mark.parametrize(
    ("kind", "looked", "pairs_found"),
    [("Llama", 0, None), ("Qwen3", 1, None), ("Olmo2", 1, ["model.layers.*.mlp"])],
)
def test_a_built_in_set_must_run_on_parts(kind: str, looked: int, pairs_found: list[str] | None) -> None:
    """The names of these models are alike; Qwen3 norms single heads, OLMo 2 all heads together, which no rank has."""
    transformers = pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, intermediate_size=48, pad_token_id=0, eos_token_id=1, **sizes
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    plan = derive_plan(PlanOptions(tp=2), world_size=2, device="cpu", native_bf16=False)
    asked: list[int] = []
    events = Events()

    def first() -> dict[str, Tensor]:
        asked.append(1)
        return {"input_ids": BATCH}

    made = infer_tp_rules(plan, model, first, events)  # type: ignore[arg-type]
    assert len(asked) == looked
    if pairs_found is None:
        assert (made, events.emitted) == (plan, [])
        return
    assert [pair.module for pair in pairs(made.tensor_parallel.rules)] == pairs_found
    ((said, fields),) = events.emitted
    assert said == "rules_inferred"
    why = fields["left"]["model.layers.*.self_attn.q_proj"]
    assert why == "its result goes through mean along the sharded dim"
