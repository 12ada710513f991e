"""Recompute of models with caches, of attention that drops, and of some blocks of each stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from unisono.dist import World
from unisono.errors import PlanError
from unisono.parallel import recompute
from unisono.parallel.apply import apply
from unisono.plan.derive import derive
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan

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
    return derive(
        PlanOptions(**{"device": "cpu", "global_batch": 4, "precision": "fp32", **options}),
        world=1,
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
        apply(plan(recompute="selective"), of_transformers(name, use_cache=True))
    assert str(caught.value) == (
        f"plan.recompute='selective' for {name} with config.use_cache=True\n"
        "  rule: a block that is computed again leaves nothing behind; a cache takes its keys and values each time\n"
        "  so:   the second pass would see another cache than the first, and nothing be saved of keys and values\n"
        "  try:  model.config.use_cache=False (a cache is of use in generation only)"
    )
    apply(plan(), of_transformers(name, use_cache=True))


@pytest.mark.parametrize(("name", "use_cache"), [("GPT2LMHeadModel", False), ("BertForMaskedLM", True)])
def test_without_a_cache_gradients_are_bitwise_equal_with_dropout(name: str, use_cache: bool) -> None:
    def gradients(how: str) -> dict[str, Tensor | None]:
        model = apply(plan(recompute=how), of_transformers(name, use_cache=use_cache)).model
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
    assert "recompute_keep '_scaled_dot_product_flash_attention' of attention with dropout 0.1" in str(caught.value)
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
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_attention_that_drops_on_an_accelerator() -> None:
    def gradients(how: str) -> list[Tensor | None]:
        torch.manual_seed(0)
        blocks = nn.Sequential(Dropping(), Dropping()).to("cuda", torch.bfloat16)
        model = apply(replace(plan(), recompute=how), blocks).model
        model(torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
        return [p.grad for p in model.parameters()]

    plain, again = gradients("none"), gradients("selective")
    for gradient, expected in zip(again, plain, strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient, expected)


def twice_run(world: World, run_dir: str, changes: dict) -> tuple[list[float], str, list[int]]:
    """Losses, digest, and how often the blocks that are here ran for each micro-batch of the last step, by number."""
    runs: Counter[int] = Counter()
    with tiny.trainer(run_dir, world=world, steps=2, dropout=0.1, micro_batch=2, sizes={"layers": 4}, **changes) as run:
        for number, block in enumerate(run.model.blocks):
            if hasattr(block, "ffn"):
                block.ffn.register_forward_pre_hook(lambda *_, number=number: runs.update([number]))
        losses = []
        for step in run:
            losses.append(step.loss)
            last = {number: count // run.plan.accumulation for number, count in runs.items()}
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
@pytest.mark.parametrize("how", [{"recompute": "full"}, {"recompute": "selective", "recompute_keep": ("mm",)}])
def test_blocks_of_each_stage_by_the_plan(
    pool: Pool, tmp_path: Path, schedule: str, splits: tuple, blocks: tuple, runs: list[int], how: dict
) -> None:
    plain = {"pp": 2, "schedule": schedule, "splits": splits}
    expected = pool.run(twice_run, str(tmp_path / "plain"), plain, ranks=2)
    found = pool.run(twice_run, str(tmp_path / "again"), {**plain, **how, "recompute_blocks": blocks}, ranks=2)
    assert [sum(each) for each in zip(*(counts for *_, counts in expected), strict=True)] == [1] * 4
    assert [sum(each) for each in zip(*(counts for *_, counts in found), strict=True)] == runs
    assert [each[:2] for each in found] == [each[:2] for each in expected]
