"""Optimizer state by name: what is in it, and what a state of another run gets to hear."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono.errors import CheckpointError
from unisono.optim import OptimOptions, build_optimizer, load_state_tensors, state_tensors


def linear(size: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, size))


def test_names_are_sorted_and_state_exists_before_the_first_step() -> None:
    model = linear()
    tensors = state_tensors(model, build_optimizer(model, OptimOptions()))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "optim/exp_avg/0.bias": (3,),
        "optim/exp_avg/0.weight": (3, 2),
        "optim/exp_avg_sq/0.bias": (3,),
        "optim/exp_avg_sq/0.weight": (3, 2),
        "optim/step/0.bias": (),
        "optim/step/0.weight": (),
    }
    assert list(tensors) == sorted(tensors)
    assert not any(tensor.any() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (OptimOptions(kind="sgd"), {"momentum_buffer"}),
        (OptimOptions(kind="sgd", momentum=0.0), set()),
        (OptimOptions(kind="lars"), {"momentum_buffer"}),
        (OptimOptions(kind="lars", momentum=0.0), set()),
        (OptimOptions(kind="lamb"), {"step", "exp_avg", "exp_avg_sq"}),
        (OptimOptions(kind="adam"), {"step", "exp_avg", "exp_avg_sq"}),
    ],
)
def test_each_optimizer_has_the_state_its_formula_needs(options: OptimOptions, names: set[str]) -> None:
    model = linear()
    assert {name.split("/")[1] for name in state_tensors(model, build_optimizer(model, options))} == names


def test_tensors_are_the_optimizers_own() -> None:
    model = linear()
    optimizer = build_optimizer(model, OptimOptions())
    step = state_tensors(model, optimizer)["optim/step/0.weight"]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert step.item() == 1.0


def test_every_mismatch_is_reported_and_nothing_is_loaded() -> None:
    model = linear()
    optimizer = build_optimizer(model, OptimOptions())
    saved = {name: torch.ones_like(tensor) for name, tensor in state_tensors(model, optimizer).items()}
    del saved["optim/step/0.bias"]
    saved["optim/exp_avg/1.weight"] = torch.ones(2, 2)
    saved["optim/exp_avg/0.weight"] = torch.ones(4, 2)
    saved["optim/exp_avg_sq/0.bias"] = torch.ones(3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError) as caught:
        load_state_tensors(model, optimizer, saved)
    consequence = "  so:   continuing would not be the same run, so nothing was loaded\n"
    assert [str(problem) for problem in caught.value.problems] == [
        "the saved state has no 'optim/step/0.bias'\n"
        "  rule: every tensor of the optimizer's state is loaded\n"
        f"{consequence}"
        "  try:  resume with the optimizer and the model that wrote it, or start a new run from the weights alone",
        "the saved state has 'optim/exp_avg/1.weight'\n"
        "  rule: every saved tensor belongs to this optimizer and model\n"
        f"{consequence}"
        "  try:  did you mean 'optim/exp_avg/0.weight'?",
        "saved 'optim/exp_avg/0.weight' is torch.float32 [4, 2], here it is torch.float32 [3, 2]\n"
        "  rule: shape and dtype are those of the run that wrote it\n"
        f"{consequence}"
        "  try:  the model sizes and the precision the checkpoint was written with",
        "saved 'optim/exp_avg_sq/0.bias' is torch.bfloat16 [3], here it is torch.float32 [3]\n"
        "  rule: shape and dtype are those of the run that wrote it\n"
        f"{consequence}"
        "  try:  the model sizes and the precision the checkpoint was written with",
    ]
    assert not any(tensor.any() for tensor in state_tensors(model, optimizer).values())


def test_another_kind_of_optimizer_is_refused() -> None:
    model = linear()
    adam, sgd = build_optimizer(model, OptimOptions()), build_optimizer(model, OptimOptions(kind="sgd", momentum=0.0))
    with pytest.raises(CheckpointError, match="an optimizer that keeps state; this one has none") as caught:
        load_state_tensors(model, sgd, state_tensors(model, adam))
    assert len(caught.value.problems) == 6


def test_another_models_optimizer_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        state_tensors(linear(), build_optimizer(linear(), OptimOptions()))
    assert str(caught.value) == (
        "optimizer AdamW has a parameter that Sequential has not\n"
        "  rule: state is named after the model's parameters\n"
        "  so:   the optimizer cannot be saved or loaded\n"
        "  try:  make the optimizer from this model's parameters, after moving or replacing them"
    )


def test_state_for_an_unknown_parameter_of_a_foreign_optimizer_is_refused() -> None:
    model = linear()
    foreign = torch.optim.RMSprop(model.parameters())
    with pytest.raises(CheckpointError, match=r"the saved state has 'optim/square_avg/1\.weight'"):
        load_state_tensors(model, foreign, {"optim/square_avg/1.weight": torch.ones(2)})
    assert not foreign.state
