"""Recompute of models with caches, of attention that drops, of some blocks of each stage, of modules by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from plan_edit import changed
from pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from unisono.dist import World
from unisono.errors import PlanError
from unisono.parallel import recompute
from unisono.parallel.tensor.tp_validation import resolve_rules
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.plan.rules import DtypeRule
from unisono.plan.validate import validate_plan

SIZES = {"vocab_size": tiny.VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES = {
    "LlamaForCausalLM": {**SIZES, "intermediate_size": 32},
    "GPT2LMHeadModel": {"vocab_size": tiny.VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "BertForMaskedLM": {**SIZES, "intermediate_size": 32},
    "T5ForConditionalGeneration": {
        "vocab_size": tiny.VOCAB,
        "d_model": 16,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    },
}


def plan(**options: Any) -> Plan:
    return derive_plan(
        PlanOptions(**{"device": "cpu", "global_batch": 4, "precision": "fp32", **options}),
        world_size=1,
        device="cpu",
        native_bf16=False,
    )


def of_transformers(name: str, *, use_cache: bool) -> Any:
    library = pytest.importorskip("transformers")
    made = getattr(library, name)
    config = made.config_class(**FAMILIES[name])
    config.use_cache = use_cache
    torch.manual_seed(0)
    return made(config).train()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_a_cache_is_refused(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        parallelize(plan(recompute="selective"), of_transformers(name, use_cache=True))
    assert str(caught.value) == (
        f"plan.recompute='selective' for {name} with config.use_cache=True\n"
        "  rule: a block that is computed again leaves nothing behind; a cache takes its keys and values each time\n"
        "  so:   the second pass would see another cache than the first, and nothing be saved of keys and values\n"
        "  try:  model.config.use_cache=False (a cache is of use in generation only)"
    )
    parallelize(plan(), of_transformers(name, use_cache=True))


@pytest.mark.parametrize(("name", "use_cache"), [("GPT2LMHeadModel", False), ("BertForMaskedLM", True)])
def test_without_a_cache_gradients_are_bitwise_equal_with_dropout(name: str, use_cache: bool) -> None:
    def gradients(how: str) -> dict[str, Tensor | None]:
        model = parallelize(plan(recompute=how), of_transformers(name, use_cache=use_cache)).model
        torch.manual_seed(1)
        tokens = torch.randint(0, tiny.VOCAB, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain = gradients("none")
    for how in ("full", "selective"):
        again = gradients(how)
        assert all(torch.equal(gradient, plain[name]) for name, gradient in again.items() if gradient is not None), how


def test_attention_that_drops_is_not_kept() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    policy, named = recompute._Policy(()), recompute._Policy((flash.__name__,))
    assert policy(None, flash.default, 0, 0, 0) == CheckpointPolicy.MUST_SAVE
    assert policy(None, flash.default, 0, 0, 0, 0.0) == CheckpointPolicy.MUST_SAVE
    assert policy(None, flash.default, 0, 0, 0, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert policy(None, efficient, 0, 0, 0, None, True, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert named(None, flash.default, 0, 0, 0) == CheckpointPolicy.MUST_SAVE
    with pytest.raises(PlanError) as caught:
        named(None, flash.default, 0, 0, 0, 0.1)
    assert "recompute.saved_ops '_scaled_dot_product_flash_attention' of attention with dropout 0.1" in str(
        caught.value
    )
    assert "dropout behind it in the block would draw other numbers" in str(caught.value)


class Dropping(nn.Module):
    """Attention with dropout, and dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each[:, None] for each in self.mix(x).chunk(3, -1))  # one head: [B, 1, T, 64]
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return x + F.dropout(mixed[:, 0], 0.5)


@pytest.mark.gpu
def test_attention_that_drops_on_an_accelerator() -> None:
    def gradients(how: str) -> list[Tensor | None]:
        torch.manual_seed(0)
        blocks = nn.Sequential(Dropping(), Dropping()).to("cuda", torch.bfloat16)
        model = parallelize(changed(plan(), recompute=how), blocks).model
        model(torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
        return [p.grad for p in model.parameters()]

    plain, again = gradients("none"), gradients("selective")
    for gradient, expected in zip(again, plain, strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient, expected)


def twice_run(world: World, run_dir: str, changes: dict) -> tuple[list[float], str, list[int]]:
    """Losses, digest, and how often the blocks that are here ran for each micro-batch of the last step, by number."""
    runs: Counter[int] = Counter()
    with tiny.trainer(
        run_dir, world=world, steps=2, dropout=0.1, micro_batch=2, sizes={"num_layers": 4}, **changes
    ) as run:
        for number, block in enumerate(run.model.blocks):
            if hasattr(block, "ffn"):
                block.ffn.register_forward_pre_hook(lambda *_, number=number: runs.update([number]))
        losses = []
        for step in run:
            losses.append(step.loss)
            last = {number: count // run.plan.batch.accumulation for number, count in runs.items()}
            runs.clear()
        return losses, tiny.digest(run), [last.get(number, 0) for number in range(4)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "splits", "blocks", "runs"),
    [
        ("1f1b", (1, 3), (0, 2), [1, 2, 2, 1]),
        ("interleaved", (1, 1, 1, 1), (1, 1, 0, 0), [2, 2, 1, 1]),
        ("zbv", (1, 1, 1, 1), (1, 0, 0, 1), [2, 1, 1, 2]),
    ],
)
@pytest.mark.parametrize("how", [{"recompute": "full"}, {"recompute": "selective", "recompute.saved_ops": ("mm",)}])
def test_blocks_of_each_stage_by_the_plan(
    pool: Pool, tmp_path: Path, schedule: str, splits: tuple, blocks: tuple, runs: list[int], how: dict
) -> None:
    plain = {"pp": 2, "schedule": schedule, "pipeline.layers_per_stage": splits}
    expected = pool.run(twice_run, str(tmp_path / "plain"), plain, ranks=2)
    found = pool.run(
        twice_run, str(tmp_path / "again"), {**plain, **how, "recompute.blocks_per_stage": blocks}, ranks=2
    )
    assert [sum(each) for each in zip(*(counts for *_, counts in expected), strict=True)] == [1] * 4
    assert [sum(each) for each in zip(*(counts for *_, counts in found), strict=True)] == runs
    assert [each[:2] for each in found] == [each[:2] for each in expected]


def gradients_of(model: nn.Module, **batch: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    out = model(**batch)
    (out.hidden if hasattr(out, "hidden") else out.loss).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("how", "modules", "runs"),
    [
        ({"recompute": "full"}, ("blocks.*.ffn",), {"ffn": 4, "attention": 2}),
        (
            {"recompute": "selective", "recompute.saved_ops": ("mm",)},
            ("blocks.0.attention", "blocks.1", "embedding"),
            {"ffn": 3, "attention": 4},
        ),
    ],
    ids=["full", "selective"],
)
def test_named_modules_are_recomputed_in_place_of_blocks(how: dict, modules: tuple, runs: dict) -> None:
    tokens = torch.arange(24).view(2, 12)
    plain = gradients_of(tiny.model(dropout=0.3), tokens=tokens)
    seen: Counter[str] = Counter()
    model = tiny.model(dropout=0.3)
    for name, module in model.named_modules():
        if name.endswith((".ffn.up", ".attention.q")):
            module.register_forward_pre_hook(lambda *_, name=name: seen.update([name.split(".")[2]]))
    again = gradients_of(
        parallelize(changed(plan(), **{"recompute.modules": modules}, **how), model).model, tokens=tokens
    )
    assert seen == runs
    assert plain.keys() == again.keys()
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())


def test_operators_to_keep_that_no_named_module_runs_are_refused() -> None:
    asked = changed(
        plan(recompute="selective"), **{"recompute.modules": ("blocks.*.ffn",), "recompute.saved_ops": ("convolution",)}
    )
    with pytest.raises(PlanError, match=r"recompute\.saved_ops convolution"):
        gradients_of(parallelize(asked, tiny.model()).model, tokens=torch.zeros(1, 8, dtype=torch.int64))


def test_modules_that_cannot_be_recomputed_are_refused_at_once() -> None:
    names = ("blocks", "blocks.*.mlp", "blocks.*.ffn", "blocks.*.ffn.up", "blocks.1.f*n")
    with pytest.raises(PlanError) as caught:
        parallelize(changed(plan(recompute="full"), **{"recompute.modules": names}), tiny.model())
    twice = (
        "  rule: one pattern of recompute.modules names a module, and none one inside it\n"
        "  so:   it would be computed again for each of them, or be unclear which counts\n"
        "  try:  the outer or the inner modules, by patterns that do not overlap"
    )
    assert str(caught.value) == (
        "4 problems\n"
        "1. recompute.modules 'blocks', which holds blocks.0\n"
        "  rule: a module that is recomputed is a repeated block, lies in one, or holds none\n"
        "  so:   all blocks in it would keep their activations in the backward pass, as if none were recomputed\n"
        "  try:  'blocks.*'\n"
        "2. recompute.modules 'blocks.*.mlp'\n"
        "  rule: it names modules of the model\n"
        "  so:   it would change nothing\n"
        "  try:  did you mean 'blocks.*'?\n"
        "3. blocks.1.ffn, which 'blocks.*.ffn' and 'blocks.1.f*n' name\n"
        f"{twice}\n"
        "4. blocks.0.ffn.up, which 'blocks.*.ffn.up' names, inside blocks.0.ffn\n"
        f"{twice}"
    )
    lists = nn.Sequential(nn.ModuleDict({"inner": nn.Linear(2, 2)}), nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"recompute\.modules '0': the model never calls 0"):
        parallelize(changed(plan(recompute="full"), **{"recompute.modules": ("0",)}), lists)


def test_modules_that_are_never_called_are_refused_before_the_first_step(tmp_path: Path) -> None:
    named = {"recompute": "full", "recompute.modules": ("blocks.*.ffn", "head")}
    with pytest.raises(PlanError) as caught, tiny.trainer(tmp_path, sizes={"tied": False}, **named):
        pass
    assert str(caught.value) == (
        "recompute.modules for 'head': the model never calls head\n"
        "  rule: a module is recomputed where it is called; some are lists, or only lend their parameters\n"
        "  so:   it would change nothing\n"
        "  try:  the module that is called: one inside, or around it"
    )


def test_a_model_without_repeated_blocks_recomputes_what_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    named = parallelize(changed(plan(recompute="full"), **{"recompute.modules": ("0",)}), model)
    assert named.model[0].forward.__wrapped__ == nn.Linear.forward.__get__(model[0])


def named_run(world: World, run_dir: str, changes: dict) -> tuple[list[float], str, dict[str, int]]:
    """Losses, digest, and how often kinds of modules ran."""
    runs: Counter[str] = Counter()
    sizes = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, **changes.pop("sizes", {})}
    with tiny.trainer(run_dir, world=world, steps=2, dropout=0.1, sizes=sizes, **changes) as run:
        for name, module in run.model.named_modules():
            if name.endswith((".ffn.up", ".ffn.router", ".attention.q")):
                kind = name.split(".")[2]
                module.register_forward_pre_hook(lambda *_, kind=kind: runs.update([kind]))
        return [step.loss for step in run], tiny.digest(run), dict(runs)


EXPERTS = {"sizes": {"num_experts": 4, "ffn_dim": 16}}
BF16 = {
    "precision": "bf16",
    "micro_batch": 4,
    "precision.dtype_rules": (DtypeRule(module="blocks.*", parameters="bf16"),),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "changes", "modules", "again"),
    [
        (2, {"tp": 2}, ("blocks.*.attention", "blocks.*.ffn"), {"attention", "ffn"}),
        (2, {"tp": 2, "sequence_parallel": True}, ("blocks.*.ffn", "blocks.*.attention.out"), {"ffn"}),
        (2, {"cp": 2}, ("blocks.*.attention",), {"attention"}),
        (2, {"dp_shard": 2}, ("blocks.*.*_norm", "blocks.*.ffn", "norm", "embedding"), {"ffn"}),
        (2, {"dp_shard": 2, **BF16}, ("blocks.*.attention_norm", "blocks.*.ffn"), {"ffn"}),
        (2, {"dp_shard": 2, "ep": 2, **EXPERTS}, ("blocks.*.ffn",), {"ffn"}),
        (2, {"pp": 2, "micro_batch": 2, "schedule": "zbv"}, ("blocks.*.ffn", "blocks.3.attention"), {"ffn"}),
        (2, {"pp": 2, "micro_batch": 2, "schedule": "interleaved"}, ("blocks.*.attention", "norm"), {"attention"}),
        (4, {"cp": 2, "tp": 2}, ("blocks.*.attention",), {"attention"}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
@pytest.mark.parametrize("how", [{"recompute": "full"}, {"recompute": "selective", "recompute.saved_ops": ("mm",)}])
def test_named_modules_along_the_axes(
    pool: Pool, tmp_path: Path, ranks: int, changes: dict, modules: tuple, again: set, how: dict
) -> None:
    expected = pool.run(named_run, str(tmp_path / "plain"), dict(changes), ranks=ranks)
    named = {**changes, **how, "recompute.modules": modules}
    found = pool.run(named_run, str(tmp_path / "again"), named, ranks=ranks)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for (*_, plain), (*_, runs) in zip(expected, found, strict=True):
        assert {kind for kind, count in runs.items() if count == 2 * plain[kind]} == again


def test_a_part_of_a_pair_is_refused() -> None:
    model = of_transformers("BertForMaskedLM", use_cache=False)
    asked = changed(plan(recompute="full"), tp=2)
    resolve_rules(model, changed(asked, **{"recompute.modules": ("**.attention", "**.self.query", "**.self.dropout")}))
    with pytest.raises(PlanError) as caught:
        resolve_rules(model, changed(asked, **{"recompute.modules": ("**.attention.self",)}))
    layer = "bert.encoder.layer.0.attention"
    assert str(caught.value) == (
        f"recompute.modules for {layer}.self with plan.tp=2, which holds {layer}.self.query and not {layer}.output.dense\n"
        "  rule: between the layers of a pair each rank draws numbers of its own; a recomputed module holds all of them, or is "
        "one of them, or holds none\n"
        "  so:   dropout would draw other numbers in the backward pass\n"
        f"  try:  {layer}, or modules between those layers"
    )


@pytest.mark.full
def test_weights_say_where_a_pipeline_is_cut(pool: Pool, tmp_path: Path) -> None:
    """And the run's plan has the splits that came of them, so that it can be run again."""
    for splits in pool.run(
        weighed, str(tmp_path), {"pp": 2, "pipeline.block_costs": (0.0, 1.0, 1.0, 1.0, 1.0, 2.0)}, ranks=2
    ):
        assert splits == ((3, 1), ())


def weighed(world: World, run_dir: str, changes: dict) -> tuple:
    with tiny.trainer(run_dir, world=world, steps=1, micro_batch=2, sizes={"num_layers": 4}, **changes) as run:
        validate_plan(run.plan, 2)
        return run.plan.pipeline.layers_per_stage, run.plan.pipeline.block_costs
