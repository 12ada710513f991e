"""Where a model may be cut, and what is left of it on a stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from unisono.errors import PlanError
from unisono.models.gpt import Block
from unisono.parallel.pipeline.partition import partition_model
from unisono.parallel.pipeline.stages import PipelineStages
from unisono.parallel.transforms import repeated_blocks

TOKENS = {"tokens": torch.arange(24).view(2, 12)}


def test_stages_in_a_row_compute_what_the_whole_does() -> None:
    whole = tiny.model(num_layers=4, tied=True)
    names = {name: p.numel() for name, p in whole.named_parameters()}
    layout = partition_model(whole, repeated_blocks(whole), TOKENS, 4)
    assert layout.shared_parameters == {"embedding.weight": (0, 3)}
    assert layout.stages_of_parameter["norm.weight"] == (3,)
    held: dict[str, int] = {}
    hidden: Any = None
    # two ranks with two pieces each
    ranks = [
        PipelineStages(model, layout, mine)
        for model, mine in zip((tiny.model(num_layers=4), tiny.model(num_layers=4)), ((0, 2), (1, 3)), strict=True)
    ]
    for stage in range(4):
        ranks[stage % 2].activate(stage, hidden)
        hidden = ranks[stage % 2].model(**TOKENS)
    torch.testing.assert_close(hidden.logits(), whole(**TOKENS).logits())
    for each in ranks:
        held |= {name: p.numel() for name, p in each.model.named_parameters()}
        assert len(each.blocks) == 2
        assert all(type(block) is Block for block in each.blocks)
    assert held == names
    assert (
        sum(p.numel() for each in ranks for p in each.model.parameters())
        == sum(names.values()) + names["embedding.weight"]
    )
    with pytest.raises(RuntimeError, match="activate"):
        ranks[0].model(**TOKENS)


class Stack(nn.Module):
    """Blocks, and a way around them or a block's habit that keeps them from being cut."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.embedding = nn.Embedding(48, 8)
        self.bias = nn.Parameter(torch.zeros(12, 8))
        self.blocks = nn.ModuleList(Layer(habit) for _ in range(3))
        if habit == "shares a weight":
            self.blocks[2].inner.weight = self.blocks[0].inner.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if self.habit == "passes a parameter on" or self.habit == "good":
                x = block(x, self.bias * 2 if self.habit != "good" else self.bias)
            elif self.habit == "skips":
                x = block(x, None) if number else block(x, None) * 2
            elif self.habit.startswith("returns"):
                x, _ = block(x, None)
            elif self.habit == "twice":
                x = block(block(x, None), None)
            else:
                x = block(x, None)
        return x + first if self.habit == "goes around" else x


class Layer(nn.Module):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Tensor | None) -> Any:
        y = self.inner(x)
        if other is not None and other.is_floating_point():
            y = y + other
        if self.habit.startswith("returns"):
            return y, y * 2 if self.habit == "returns two" else None
        return y


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        ("passes a parameter on", "blocks.1 is given argument 1, which depends on parameters outside it"),
        ("skips", "blocks.1 is not called with what the block before it returned"),
        ("twice", "blocks.0 runs 2 times, or out of order"),
        ("returns two", "blocks.0 returns more tensors than the hidden state"),
        ("goes around", "the model itself uses what another block, or what is before the blocks, computed"),
        ("shares a weight", "blocks.0.inner.weight is used outside its block too"),
    ],
)
def test_what_cannot_be_cut_is_named(habit: str, text: str) -> None:
    model = Stack(habit)
    with pytest.raises(PlanError) as caught:
        partition_model(model, repeated_blocks(model), TOKENS, 2)
    assert text in str(caught.value)
    assert "plan.pp=1" in str(caught.value)


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        partition_model(nn.Linear(2, 2), [], TOKENS, 2)
    assert "plan.pp for Linear, which has no repeated blocks" in str(caught.value)
    assert "plan.pp=1 with plan.dp_shard" in str(caught.value)


def test_blocks_may_return_a_tuple() -> None:
    torch.manual_seed(0)
    whole, *parts = (copy.deepcopy(model) for model in [Stack("returns one and None")] * 3)
    layout = partition_model(whole, repeated_blocks(whole), TOKENS, 2)
    hidden = None
    for stage, part in enumerate(parts):
        stages = PipelineStages(part, layout, (stage,))
        stages.activate(stage, hidden)
        hidden = part(**TOKENS)
    torch.testing.assert_close(hidden, whole(**TOKENS))


def test_splits_must_fit_the_model() -> None:
    model = Stack("good")
    layout = partition_model(model, repeated_blocks(model), TOKENS, 2)
    assert layout.layers_per_stage == (1, 2)
    assert layout.shared_parameters == {"bias": (0, 1)}  # given to blocks as it is, it is on their stages
    assert partition_model(model, repeated_blocks(model), TOKENS, 2, (2, 1)).layers_per_stage == (2, 1)
    with pytest.raises(PlanError, match=r"layers_per_stage \[2, 2\] for Stack with 3 blocks in 2 stages"):
        partition_model(model, repeated_blocks(model), TOKENS, 2, (2, 2))
    with pytest.raises(PlanError, match="a model of 3 blocks in 4 stages"):
        partition_model(model, repeated_blocks(model), TOKENS, 4)


@pytest.mark.parametrize(
    ("weights", "splits"), [((0, 1, 1, 1, 2), (2, 1)), ((2, 1, 1, 1, 0), (1, 2)), ((0, 3, 1, 1, 0), (1, 2))]
)
def test_splits_are_derived_from_weights(weights: tuple, splits: tuple) -> None:
    model = Stack("good")
    assert partition_model(model, repeated_blocks(model), TOKENS, 2, block_costs=weights).layers_per_stage == splits
    with pytest.raises(PlanError) as caught:
        partition_model(model, repeated_blocks(model), TOKENS, 2, block_costs=weights[1:-1])
    assert str(caught.value) == (
        "3 block_costs for Stack with 3 blocks\n"
        "  rule: one cost for what comes before the blocks, one for each block, one for what follows them\n"
        "  so:   it would be unclear what each of them is the cost of\n"
        "  try:  5 numbers, or none (they are counted)"
    )
