"""One contract for all optimizers: they learn, can be skipped on the device, scale gradients, and go on bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.errors import ConfigError
from unisono.optim import (
    Lamb,
    Lars,
    OptimOptions,
    build_optimizer,
    clip_coefficient,
    global_norm,
    load_state_tensors,
    make_skippable,
    state_tensors,
)

OPTIONS = {
    "sgd": OptimOptions(kind="sgd", lr=0.05, momentum=0.0, weight_decay=0.01),
    "momentum": OptimOptions(kind="sgd", lr=0.05, weight_decay=0.01),
    "nesterov": OptimOptions(kind="sgd", lr=0.05, nesterov=True, weight_decay=0.01),
    "adam": OptimOptions(kind="adam", lr=0.05, weight_decay=0.01),
    "adamw": OptimOptions(kind="adamw", lr=0.05, weight_decay=0.01),
    "lamb": OptimOptions(kind="lamb", lr=0.05, weight_decay=0.01),
    "lamb_no_decay": OptimOptions(kind="lamb", lr=0.05, weight_decay=0.0),
    "lars": OptimOptions(kind="lars", lr=0.5, trust_coefficient=0.1, weight_decay=0.01),
    "lars_no_momentum": OptimOptions(kind="lars", lr=0.5, trust_coefficient=0.1, momentum=0.0, weight_decay=0.01),
}
DEVICES = [
    "cpu",
    pytest.param(
        "accelerator",
        marks=pytest.mark.gpu,
    ),
]


@pytest.fixture(params=OPTIONS)
def options(request: pytest.FixtureRequest) -> OptimOptions:
    return OPTIONS[request.param]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    found = torch.accelerator.current_accelerator() if request.param == "accelerator" else torch.device("cpu")
    assert found is not None
    return found


class Strided(nn.Module):
    """Holds a parameter with gaps in memory, which torch's fused kernels would misread: the way without them."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gaps = nn.Parameter(torch.randn(6, 8).to(device, dtype)[:, ::2])


def small(seed: int, device: torch.device, dtype: torch.dtype = torch.float32, *, fused: bool = True) -> nn.Module:
    """A model with every role of parameter, among them zeros of both signs and a parameter that gets no gradient."""
    torch.manual_seed(seed)
    layers = [nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Conv2d(2, 3, 3)]
    model = nn.Sequential(*layers)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, 2)))
    with torch.no_grad():
        layers[1].weight[0] = -0.0  # type: ignore[index]
        layers[1].bias.fill_(-0.0)  # type: ignore[union-attr]
    model.to(device, dtype)
    if not fused:
        model.append(Strided(device, dtype))  # where it stays: a copy to another device or dtype has no gaps
    return model


def give_gradients(model: nn.Module, step: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        if name != "unused":
            grad = torch.randn(parameter.shape, generator=generator) * factor
            parameter.grad = grad.to(parameter.device, parameter.dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8 if tensor.ndim else tensor.dtype).numpy().tobytes()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    tensors = {**dict(model.named_parameters()), **state_tensors(model, optimizer)}
    return {name: bits(tensor) for name, tensor in tensors.items()}


def skipping(optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(
    ("flag", "bad"), [(1.0, float("nan")), (3.5, float("inf")), (float("nan"), -float("inf")), (1e-30, 1.0)]
)
def test_a_skipped_step_changes_no_bit(
    options: OptimOptions, device: torch.device, fused: bool, flag: float, bad: float
) -> None:
    model, undisturbed = small(0, device, fused=fused), small(0, device, fused=fused)
    optimizer, reference = build_optimizer(model, options), build_optimizer(undisturbed, options)
    assert all(group["fused"] for group in optimizer.param_groups) is fused
    for step, skip in enumerate([True, False, False, True, False]):  # the first step of all is skipped, too
        give_gradients(model, step, bad if skip else 1.0)
        shape = () if step % 2 else (1,)
        given = torch.full(shape, flag if skip else 0.0, device=device)
        skipping(optimizer, given)
        before = everything(model, optimizer)
        optimizer.step()
        assert optimizer.found_inf is given  # type: ignore[attr-defined]
        if skip:
            assert everything(model, optimizer) == before
        else:
            give_gradients(undisturbed, step)
            reference.step()
            assert everything(model, optimizer) == everything(undisturbed, reference)
            assert everything(model, optimizer) != before


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_grad_scale_is_dividing(options: OptimOptions, device: torch.device, fused: bool, dtype: torch.dtype) -> None:
    model, other = small(1, device, dtype, fused=fused), small(1, device, dtype, fused=fused)
    optimizer, reference = build_optimizer(model, options), build_optimizer(other, options)
    for step in range(3):
        give_gradients(model, step, 1024.0)
        give_gradients(other, step)
        optimizer.grad_scale = torch.tensor([1024.0], device=device)  # type: ignore[attr-defined]
        optimizer.step()
        reference.step()
    # A power of two is exact; LARS meets it in the ratio of norms, where two roundings may fall differently. So they may in SGD's
    # fused kernel of an accelerator: whether a product and a sum are rounded once or twice there may depend on the division
    # beside them. Then parameters near 0 differ by a rounding of the update.
    rounded = fused and options.kind == "sgd" and device.type != "cpu" and dtype == torch.float32
    assert all(
        torch.equal(a, b)
        if options.kind != "lars" and not rounded
        else torch.allclose(a, b, rtol=2e-6 if a.dtype == torch.float32 else 1e-2, atol=1e-7 if rounded else 1e-8)
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_clipping_goes_into_the_scale(options: OptimOptions, device: torch.device) -> None:
    model, other = small(2, device), small(2, device)
    optimizer, reference = build_optimizer(model, options), build_optimizer(other, options)
    for step in range(3):
        give_gradients(model, step, 8.0)
        give_gradients(other, step, 8.0)
        norm = global_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.grad_scale = 1.0 / clip_coefficient(norm, 1.0)  # type: ignore[attr-defined]
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        reference.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # torch divides by norm + 1e-6


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_loading_before_the_first_step_continues_bit_for_bit(
    options: OptimOptions, device: torch.device, fused: bool, dtype: torch.dtype
) -> None:
    straight = small(3, device, dtype, fused=fused)
    optimizer = build_optimizer(straight, options)
    for step in range(3):
        give_gradients(straight, step)
        optimizer.step()
    saved = safetensors.torch.save({k: v.contiguous() for k, v in state_tensors(straight, optimizer).items()})
    resumed = small(4, device, dtype, fused=fused)
    with torch.no_grad():
        for own, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
            own.copy_(theirs)
    fresh = build_optimizer(resumed, options)
    load_state_tensors(resumed, fresh, safetensors.torch.load(saved))
    for step in range(3, 6):
        for model, each in ((straight, optimizer), (resumed, fresh)):
            give_gradients(model, step)
            each.step()
        assert everything(resumed, fresh) == everything(straight, optimizer)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_state_made_beforehand_is_what_torch_would_make(device: torch.device, fused: bool) -> None:
    for name in ("sgd", "momentum", "nesterov", "adam", "adamw"):
        options = OPTIONS[name]
        ours, theirs = small(5, device, fused=fused), small(5, device, fused=fused)
        optimizer = build_optimizer(ours, options)
        names = {id(p): n for n, p in ours.named_parameters()}
        by_name = dict(theirs.named_parameters())
        groups = [
            {"params": [by_name[names[id(p)]] for p in group["params"]], "weight_decay": group["weight_decay"]}
            for group in optimizer.param_groups
        ]
        settings: dict[str, Any] = {"lr": options.lr, "fused": fused or None}
        if options.kind == "sgd":
            settings |= {"momentum": options.momentum, "nesterov": options.nesterov}
        else:
            settings |= {"betas": (options.beta1, options.beta2), "eps": options.eps}
        lazy = type(optimizer)(groups, **settings)
        for step in range(3):
            for model, each in ((ours, optimizer), (theirs, lazy)):
                give_gradients(model, step)
                each.step()
            assert {n: bits(p) for n, p in ours.named_parameters()} == {
                n: bits(p) for n, p in theirs.named_parameters()
            }
        for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            for key, value in lazy.state.get(other, {}).items():
                if value is not None:
                    assert torch.equal(optimizer.state[parameter][key], value)


def test_a_gradient_in_another_layout_is_understood(options: OptimOptions, device: torch.device) -> None:
    model, other = small(6, device), small(6, device).to(memory_format=torch.channels_last)
    optimizer, reference = build_optimizer(model, options), build_optimizer(other, options)
    for step in range(3):
        give_gradients(model, step)
        give_gradients(other, step)
        given = other[3].weight.grad  # type: ignore[index, union-attr]
        assert isinstance(given, Tensor)
        assert given.stride() != other[3].weight.stride()  # type: ignore[index, union-attr, operator]
        optimizer.step()
        reference.step()
        assert other[3].weight.grad is given  # type: ignore[index, union-attr]
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b.contiguous(), rtol=1e-5, atol=1e-7)  # norms are summed in another order


class CountHostReads(TorchDispatchMode):
    """Counts what would make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def test_nothing_reads_the_device(options: OptimOptions) -> None:
    model = small(7, torch.device("cpu"))
    optimizer = build_optimizer(model, options)
    give_gradients(model, 0)
    with CountHostReads() as seen:
        norm = global_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.grad_scale = 2.0 / clip_coefficient(norm, 1.0)  # type: ignore[attr-defined]
        skipping(optimizer, (~norm.isfinite()).float())
        optimizer.step()
    assert seen.reads == 0
    with CountHostReads() as seen:
        assert float(norm) > 0
    assert seen.reads == 1


def minimise(
    options: OptimOptions, start: Tensor, loss: Callable[[Tensor], Tensor], steps: int, final_frac: float = 0.01
) -> tuple[float, float]:
    """Loss before and after, with a learning rate that falls linearly."""
    holder = nn.Module()
    holder.point = nn.Parameter(start.clone())
    optimizer = build_optimizer(holder, options)
    first = loss(holder.point).item()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * max(1 - step / steps, final_frac)
        optimizer.zero_grad()
        loss(holder.point).backward()
        optimizer.step()
    return first, loss(holder.point).item()


QUADRATIC = {
    "sgd": OptimOptions(kind="sgd", lr=0.1, momentum=0.0, weight_decay=0.0),
    "momentum": OptimOptions(kind="sgd", lr=0.02, weight_decay=0.0),
    "nesterov": OptimOptions(kind="sgd", lr=0.02, nesterov=True, weight_decay=0.0),
    "adam": OptimOptions(kind="adam", lr=0.1, weight_decay=0.0),
    "adamw": OptimOptions(kind="adamw", lr=0.1, weight_decay=0.0),
    "lamb": OptimOptions(kind="lamb", lr=0.1, weight_decay=0.0),
    "lars": OptimOptions(kind="lars", lr=1.0, trust_coefficient=0.02, weight_decay=0.0),
}


@pytest.mark.parametrize("kind", QUADRATIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_finds_the_bottom_of_a_bowl(kind: str, dtype: torch.dtype) -> None:
    target = torch.tensor([[3.0, -2.0, 0.5], [1.0, 4.0, -1.0]], dtype=dtype)
    curvature = torch.tensor([[1.0, 2.0, 0.5], [4.0, 1.0, 3.0]], dtype=dtype)
    first, last = minimise(
        QUADRATIC[kind], torch.ones_like(target), lambda x: (curvature * (x - target) ** 2).sum(), 300
    )
    # LAMB and LARS still move by lr * 1 % of the weight's norm at the end; bf16 loses an update below 1/256 of the weight
    layerwise = kind in ("lamb", "lars")
    assert last < (1e-3 if dtype == torch.bfloat16 else 1e-5 if layerwise else 1e-9) * first


ROSENBROCK = {
    "sgd": OptimOptions(kind="sgd", lr=1.5e-3, momentum=0.0, weight_decay=0.0),
    "momentum": OptimOptions(kind="sgd", lr=5e-4, weight_decay=0.0),
    "nesterov": OptimOptions(kind="sgd", lr=5e-4, nesterov=True, weight_decay=0.0),
    "adam": OptimOptions(kind="adam", lr=0.03, weight_decay=0.0),
    "adamw": OptimOptions(kind="adamw", lr=0.03, weight_decay=0.0),
    "lamb": OptimOptions(kind="lamb", lr=0.1, weight_decay=0.0),
    "lars": OptimOptions(kind="lars", lr=1.0, trust_coefficient=5e-3, weight_decay=0.0),
}


@pytest.mark.parametrize("kind", ROSENBROCK)
def test_it_follows_the_curved_valley(kind: str) -> None:
    def rosenbrock(point: Tensor) -> Tensor:
        x, y = point[0, 0], point[0, 1]
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2

    first, last = minimise(ROSENBROCK[kind], torch.tensor([[-1.2, 1.0]]), rosenbrock, 1500 if kind == "sgd" else 500)
    assert first == pytest.approx(24.2, rel=1e-6)
    assert last < 0.8  # beyond the turn at the origin, where the loss is 1 and LAMB and LARS take their smallest steps


@pytest.mark.parametrize("make", [Lamb, Lars])
def test_own_optimizers_work_with_torchs_grad_scaler(make: type[Lamb] | type[Lars]) -> None:
    model = small(8, torch.device("cpu"))
    optimizer = make([p for p in model.parameters() if p is not model.unused], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)  # type: ignore[attr-defined]
    scaler.scale(torch.zeros(()))
    give_gradients(model, 0, float("inf"))
    before = {n: bits(p) for n, p in model.named_parameters()}
    with CountHostReads() as seen:
        scaler.step(optimizer)
    assert seen.reads == 0  # the scaler leaves the decision to the optimizer
    scaler.update()
    assert {n: bits(p) for n, p in model.named_parameters()} == before
    assert scaler.get_scale() == 4.0
    give_gradients(model, 1, 4.0)
    scaler.step(optimizer)
    assert {n: bits(p) for n, p in model.named_parameters()} != before


@pytest.mark.parametrize("make", [Lamb, Lars])
def test_own_optimizers_keep_torchs_protocol(make: type[Lamb] | type[Lars]) -> None:
    """A closure is evaluated, ``state_dict`` travels, a group added later is trained."""
    models = [small(9, torch.device("cpu")), small(9, torch.device("cpu"))]
    optimizers = [make(model[1].parameters(), lr=0.1, weight_decay=0.1) for model in models]  # type: ignore[index]
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.add_param_group({"params": [model[3].weight]})  # type: ignore[index]
    losses = []

    def closure() -> Tensor:
        optimizers[0].zero_grad()
        loss = (models[0][1](torch.ones(1, 4)) ** 2).sum() + (models[0][3].weight ** 2).sum()  # type: ignore[index, operator]
        loss.backward()
        return loss

    for _ in range(3):
        losses.append(optimizers[0].step(closure).item())
    assert losses[2] < losses[0]
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))  # torch would share the tensors
    for model, optimizer in zip(models, optimizers, strict=True):
        give_gradients(model, 3)
        optimizer.step()
    assert [bits(p) for p in models[0].parameters()] == [bits(p) for p in models[1].parameters()]


FOREIGN: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adam_fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_optimizer_made_elsewhere_can_be_skipped_saved_and_continued(name: str) -> None:
    cpu = torch.device("cpu")
    models = [small(10, cpu), small(10, cpu)]
    first, second = (make_skippable(FOREIGN[name](model.parameters())) for model in models)
    for step, skip in enumerate([True, False, True, False]):
        give_gradients(models[0], step, float("nan") if skip else 1.0)
        skipping(first, torch.tensor(float(skip)))
        before = everything(models[0], first)
        first.step()
        assert (everything(models[0], first) == before) is skip
    models[1].load_state_dict(models[0].state_dict())
    load_state_tensors(models[1], second, {k: v.clone() for k, v in state_tensors(models[0], first).items()})
    for model, optimizer in zip(models, (first, second), strict=True):
        skipping(optimizer, None)
        give_gradients(model, 9)
        optimizer.step()
    assert everything(models[0], first) == everything(models[1], second)


def test_state_outside_tensors_is_refused() -> None:
    model = small(11, torch.device("cpu"))
    optimizer = make_skippable(torch.optim.AdamW(model.parameters(), lr=0.1))
    give_gradients(model, 0)
    optimizer.step()
    for state in optimizer.state.values():
        state["count"] = 1
    skipping(optimizer, torch.tensor(1.0))
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "optimizer AdamW keeps its state 'count' as int\n"
        "  rule: all state is tensors, so that a step can be skipped on the device and the state be saved without pickle\n"
        "  so:   a skipped step would change it\n"
        "  try:  one of torch's SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, or unisono.optim.build_optimizer"
    )
