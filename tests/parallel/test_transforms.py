"""Recompute, compile and layout act on the model in place, change no name and no result."""

from __future__ import annotations

import getpass
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from modes import mode_of, umask
from plan_edit import changed
from torch import nn

from unisono.errors import PlanError
from unisono.models.gpt import GPT
from unisono.models.loss import cross_entropy_sum
from unisono.models.options import ModelOptions
from unisono.parallel.device import find_device
from unisono.parallel.transforms import TRANSFORMS, Transform, check_transforms, parallelize, repeated_blocks
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.plan.validate import validate_plan


def plan(**options: object) -> Plan:
    return derive_plan(PlanOptions(device="cpu", **options), world_size=1, device="cpu", native_bf16=False)


def gpt(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelOptions(num_layers=3, dim=32, num_heads=4, num_kv_heads=2, vocab_size=64, dropout=dropout))


def gradients(model: nn.Module, precision: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (2, 16), generator=generator)
    torch.manual_seed(7)
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        loss, _ = cross_entropy_sum(model(tokens), tokens.roll(-1, 1), torch.ones(2, 16))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize(
    "precision", [pytest.param(None, id="fp32", marks=pytest.mark.full), pytest.param(torch.bfloat16, id="bf16")]
)
def test_recompute_is_bitwise_equal_including_dropout(recompute: str, precision: torch.dtype | None) -> None:
    plain = gradients(gpt(dropout=0.3), precision)
    model = parallelize(plan(recompute=recompute), gpt(dropout=0.3)).model
    again = gradients(model, precision)
    assert plain.keys() == again.keys()
    for name in plain:
        assert torch.equal(plain[name], again[name]), name


@pytest.mark.parametrize(("recompute", "fewer"), [("full", True), ("selective", True), ("none", False)])
def test_recompute_keeps_fewer_activations(recompute: str, fewer: bool) -> None:
    plain = saved_bytes(gpt())
    chosen = saved_bytes(parallelize(plan(recompute=recompute), gpt()).model)
    assert (chosen < 0.6 * plain) == fewer


def saved_bytes(model: nn.Module) -> int:
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    tokens = torch.randint(0, 64, (4, 64))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        cross_entropy_sum(model(tokens), tokens, torch.ones(4, 64))
    return total


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "full", "recompute.blocks_per_stage": (2,)},
        {"recompute": "selective", "recompute.blocks_per_stage": (1,)},
        {"recompute": "selective", "recompute.saved_ops": ("mm",)},
        {"recompute": "selective", "recompute.blocks_per_stage": (2,), "recompute.saved_ops": ("mm", "silu")},
    ],
)
def test_partial_lists_are_bitwise_equal_including_dropout(changes: dict) -> None:
    plain = gradients(gpt(dropout=0.3), torch.bfloat16)
    again = gradients(parallelize(changed(plan(), **changes), gpt(dropout=0.3)).model, torch.bfloat16)
    assert plain.keys() == again.keys()
    for name in plain:
        assert torch.equal(plain[name], again[name]), name


def test_partial_lists_keep_what_they_say() -> None:
    counts = [saved_bytes(gpt())]
    for blocks in (1, 2, 3):
        counts.append(
            saved_bytes(
                parallelize(changed(plan(recompute="full"), **{"recompute.blocks_per_stage": (blocks,)}), gpt()).model
            )
        )
    steps = {before - after for before, after in pairwise(counts)}
    assert len(steps) == 1
    assert steps.pop() > 0.2 * counts[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recompute.blocks_per_stage": (1,)}, "recompute.blocks_per_stage [1] with recompute 'none'"),
        ({"recompute": "full", "recompute.blocks_per_stage": (0,)}, "recompute.blocks_per_stage [0] for 1 stage"),
        (
            {"recompute": "full", "recompute.blocks_per_stage": (1, 1)},
            "recompute.blocks_per_stage [1, 1] for 1 stage",
        ),
        ({"recompute": "full", "recompute.saved_ops": ("mm",)}, "recompute.saved_ops ['mm'] with recompute 'full'"),
    ],
)
def test_lists_that_say_nothing_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(PlanError) as raised:
        validate_plan(changed(plan(), **changes), 1)
    assert str(raised.value).startswith(said)


def test_lists_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(PlanError, match=r"recompute.blocks_per_stage\[0\] is 4, and that stage has 3 blocks"):
        parallelize(changed(plan(recompute="full"), **{"recompute.blocks_per_stage": (4,)}), gpt())
    for name in ("adddmm", "bernoulli_", "native_dropout"):
        with pytest.raises(PlanError, match=f"recompute.saved_ops '{name}'") as raised:
            parallelize(changed(plan(recompute="selective"), **{"recompute.saved_ops": (name,)}), gpt())
        assert "did you mean" in str(raised.value)
    model = parallelize(
        changed(plan(recompute="selective"), **{"recompute.saved_ops": ("mm", "convolution")}), gpt()
    ).model
    with pytest.raises(PlanError, match=r"recompute\.saved_ops convolution") as raised:
        gradients(model)
    assert "it names operators that the recomputed blocks run" in str(raised.value)


def test_names_do_not_change() -> None:
    model = gpt()
    before = list(model.state_dict())
    assert list(parallelize(plan(recompute="full", compile="regional"), model).model.state_dict()) == before


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["model", "regional"])
def test_compiled_gradients_agree(how: str) -> None:
    plain = gradients(gpt())
    compiled = gradients(parallelize(plan(compile=how), gpt()).model)
    for name in plain:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("named", [(), ("blocks.*.ffn", "blocks.*.attention_norm")], ids=["blocks", "named"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_regional_compile_compiles_one_block_once(recompute: str, named: tuple[str, ...]) -> None:
    """And none for another model of the same shape in the same process: past eight, torch would stop compiling."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        asked = changed(plan(compile="regional", recompute=recompute), **{"recompute.modules": named})
        compiled = gradients(parallelize(asked, gpt()).model)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for name, gradient in gradients(gpt()).items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("mode", [0o777, 0o1777, "of another user"])
def test_compiled_code_is_not_loaded_from_a_folder_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | str, named: bool
) -> None:
    name = "folder" if named else f"torchinductor_{getpass.getuser()}"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if named:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
    (tmp_path / name).mkdir()
    if isinstance(mode, int):
        (tmp_path / name).chmod(mode)
    elif os.geteuid() != 0:
        pytest.skip("a folder of another user needs root: it was not tried")
    else:
        os.chown(tmp_path / name, 65534, 65534)
    said = "belongs to the user nobody" if isinstance(mode, str) else f"can be written by others (mode {mode:o})"
    with pytest.raises(PlanError) as caught:
        parallelize(plan(compile="regional"), gpt())
    assert str(caught.value) == (
        f"torch's folder of compiled code, which is not this user's alone: {tmp_path / name} {said}\n"
        "  rule: compiled code is loaded only from a folder that this user or root alone can have written\n"
        "  so:   nothing was compiled, and nothing was loaded from it\n"
        "  try:  TORCHINDUCTOR_CACHE_DIR with a folder of your own, or plan.compile=off"
    )


def test_a_new_folder_of_compiled_code_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    with umask(0):
        parallelize(plan(compile="regional"), gpt())
    assert mode_of(tmp_path / "new") == 0o700


def test_a_choice_that_would_act_on_nothing_is_an_error() -> None:
    with pytest.raises(PlanError) as raised:
        parallelize(plan(recompute="full", compile="off"), nn.Linear(2, 2))
    assert str(raised.value) == (
        "plan.recompute='full' for Linear\n"
        "  rule: it acts on repeated blocks: a ModuleList or Sequential with two or more members of one class\n"
        "  so:   it would change nothing\n"
        "  try:  plan.recompute='none', or keep the blocks in a ModuleList"
    )


def test_experts_are_not_compiled() -> None:
    model = GPT(ModelOptions(num_layers=2, dim=16, num_heads=2, num_kv_heads=1, vocab_size=64, num_experts=4))
    with pytest.raises(PlanError) as raised:
        parallelize(plan(compile="regional"), model)
    assert str(raised.value) == (
        "plan.compile='regional' for GPT with experts\n"
        "  rule: how many tokens an expert gets is known only when they are there; compiled graphs have fixed shapes\n"
        "  so:   the graph would break in every block\n"
        "  try:  compile='off', or model.num_experts=0"
    )


def test_repeated_blocks_are_found_in_a_users_model() -> None:
    class Block(nn.Module):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Block(), Block(), Block()), nn.Linear(2, 2))
    assert [type(b) for b in repeated_blocks(model)] == [Block] * 3


def test_channels_last_lays_weights_out() -> None:
    model = parallelize(plan(channels_last=True), nn.Sequential(nn.Conv2d(3, 8, 3))).model
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_device_that_is_absent_is_an_error() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(PlanError) as raised:
        find_device("cuda", 0)
    assert str(raised.value) == (
        f"plan.device 'cuda'\n  rule: this torch ({torch.__version__}) sees only the CPU\n"
        "  so:   nothing was started\n  try:  plan.device='cpu', or a torch built for 'cuda' and its driver"
    )


def test_checks_and_application_walk_one_list() -> None:
    """A transform of one's own is an entry among the others; what it says against a model comes with what they say."""
    applied: list[str] = []

    def refuse(_model: nn.Module, _plan: Plan) -> None:
        raise PlanError(given="a tap", rule="it taps something", consequence="it would change nothing", nearest="none")

    tap = Transform("tap", lambda _plan: True, lambda _model, _plan: None, lambda state, _mesh: applied.append("tap"))
    model = parallelize(plan(recompute="full"), gpt(), transforms=[*TRANSFORMS, tap]).model
    assert applied == ["tap"]
    assert isinstance(model, GPT)
    assert [t.name for t in TRANSFORMS if t.is_active(plan(recompute="full"))] == ["recompute"]
    with pytest.raises(PlanError) as raised:
        parallelize(plan(recompute="full"), nn.Linear(2, 2), transforms=[*TRANSFORMS, tap._replace(validate=refuse)])
    assert [problem.given for problem in raised.value.problems] == ["plan.recompute='full' for Linear", "a tap"]
    assert check_transforms(gpt(), plan(recompute="full")) == []
