"""Numbers of 8 and 4 bits: grids, packing, integer products, and the layers of each reference model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.errors import ConfigError
from unisono.models import quantized
from unisono.models.bert import BERT, BertOptions, ClassHead
from unisono.models.gpt import GPT
from unisono.models.options import ModelOptions
from unisono.models.quantize_options import QuantizeOptions, Scheme
from unisono.models.quantized import Form, form_of, from_integers, integer_matmul, pack, store, unpack
from unisono.models.quantized_model import make_aware, make_stored, select_layers, stored_layers
from unisono.models.resnet import ResNet, ResNetOptions
from unisono.models.table import TableNet, TableOptions

FORMS = [form_of("int8", 32), form_of("int4", 8), form_of("int4", 32)]
SCHEMES: list[Scheme] = ["int8", "int8_dynamic", "int8_static", "int4"]


def store_all(model: nn.Module, options: QuantizeOptions) -> nn.Module:
    """A copy with stored layers; inputs of up to 4 have a static scale."""
    weights, changed = select_layers(model, options, convolutions=True).weights, copy.deepcopy(model)
    scale = torch.tensor([4 / 127.5]) if options.scheme == "int8_static" else None
    for name, layer in make_stored(changed, options, convolutions=True).items():
        store(layer, weights[name], scale)
    return changed


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_weight_is_at_most_half_a_step_away(form: Form) -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    scale = quantized.weight_scale(weight, form)
    integers = quantized.weight_integers(weight, scale, form)
    again = from_integers(integers, scale, form)
    group = form.group_size or 64
    step = scale.float().repeat_interleave(group, -1)
    largest = weight.unflatten(-1, (-1, group)).abs().amax(-1).repeat_interleave(group, -1)
    inner = weight.abs() < largest * 0.99  # a large positive one is cut, by half a step and the rounding of its scale
    assert (((again - weight).abs() / step)[inner] <= 0.5 + 1e-4).all()
    assert (((again - weight).abs() / step) <= 1.01).all()
    assert (again[3] == 0).all()
    assert integers.min() >= -(2 ** (form.bits - 1))
    assert integers.max() == 2 ** (form.bits - 1) - 1


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_packing_loses_nothing(form: Form) -> None:
    every = torch.arange(-(2 ** (form.bits - 1)), 2 ** (form.bits - 1), dtype=torch.int8)
    rows = every.repeat(3, 4)[:, torch.randperm(4 * len(every), generator=torch.Generator().manual_seed(1))]
    packed = pack(rows, form)
    assert packed.nbytes == rows.numel() * form.bits // 8
    assert torch.equal(unpack(packed, form), rows)


def test_the_first_of_a_pair_is_in_the_lower_half() -> None:
    assert pack(torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8), form_of("int4", 8)).tolist() == [[0xF0, 0x78]]


@pytest.mark.parametrize("exact", [True, False])
def test_integer_products_are_exact(monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    monkeypatch.setattr(quantized, "int_mm_is_exact", lambda _device: exact)
    generator = torch.Generator().manual_seed(2)
    for rows, columns, outputs in ((1, 5, 3), (33, 2501, 17), (0, 8, 4)):
        x, weight = (
            torch.randint(-128, 128, (n, columns), dtype=torch.int8, generator=generator) for n in (rows, outputs)
        )
        x[:1], weight[:1] = 127, 127  # an odd sum beyond 2^24, which float32 does not hold
        assert torch.equal(integer_matmul(x, weight).long(), x.long() @ weight.long().t())


def test_the_gradient_is_that_of_the_weight_itself() -> None:
    weight = torch.randn(8, 32, requires_grad=True)
    rounded = quantized.rounded_weight(weight, form_of("int4", 8))
    assert not torch.equal(rounded, weight)
    upstream = torch.randn(8, 32)
    (rounded * upstream).sum().backward()
    assert torch.equal(weight.grad, upstream)  # pyright: ignore[reportArgumentType]


def models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """Each reference model, and inputs."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "dim": 32, "num_layers": 2, "ffn_dim": 64}
    tokens, image = torch.randint(0, 64, (2, 7)), torch.randn(2, 3, 16, 16)
    bert = BertOptions(vocab_size=64, dim=32, num_layers=2, num_heads=4, ffn_dim=64, max_length=16)
    table = TableOptions(numbers=3, categories=2, outputs=5, num_layers=2, dim=32, buckets=16)
    resnet = ResNetOptions(classes=3, depths=(1, 1), widths=(8, 16), stem="small")
    return {
        "gpt": (GPT(ModelOptions(**sizes)), (tokens,)),
        "untied": (GPT(ModelOptions(**sizes, tied=False)), (tokens,)),
        "moe": (GPT(ModelOptions(**sizes, num_experts=4)), (tokens,)),
        "bert": (BERT(bert), (tokens,)),
        "classes": (BERT(bert, ClassHead(bert, 3)), (tokens,)),
        "table": (TableNet(table), (torch.randn(2, 3), torch.randint(0, 16, (2, 2)))),
        "resnet": (ResNet(resnet), (image,)),
    }


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        made = model(*inputs)
        return made if isinstance(made, Tensor) else made.logits()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", models())
def test_every_reference_model(name: str, scheme: Scheme) -> None:
    model, inputs = models()[name]
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too are away from 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    options = QuantizeOptions(scheme=scheme)
    no_convolutions, no_experts = scheme in ("int8_dynamic", "int4"), scheme in ("int8_dynamic", "int8_static")
    if (name == "resnet" and no_convolutions) or (name == "moe" and no_experts):
        with pytest.raises(ConfigError, match="no layer is left" if name == "resnet" else "would be kept"):
            store_all(model, options)
        return
    stored = store_all(model, options)
    mine, theirs = outputs(stored, inputs), outputs(model, inputs)
    assert not torch.equal(mine, theirs)
    error = float((mine - theirs).norm() / theirs.norm())
    assert error < {"int4": 0.6, "int8_static": 0.1}.get(scheme, 0.05)
    assert stored_layers(stored).keys() == select_layers(model, options, convolutions=True).weights.keys()
    if scheme != "int8_static":
        aware = copy.deepcopy(model)
        make_aware(aware, options, convolutions=True)
        assert list(aware.state_dict()) == list(model.state_dict())
        assert torch.equal(outputs(aware, inputs), mine)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(outputs(aware, inputs), outputs(stored, inputs))


def test_integers_compute_what_rounded_numbers_do() -> None:
    """The integer path against the definition, in float64."""
    layer, x = nn.Linear(64, 24), torch.randn(5, 7, 64)
    stored = quantized.QuantizedLinear(layer, form_of("int8_dynamic", 0))
    store(stored, layer.weight)
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    rounded = (x / scale).round().clamp(-128, 127).double() * scale.double()
    weight = stored.weight_packed.double() * stored.weight_scale.double()
    torch.testing.assert_close(stored(x).double(), F.linear(rounded, weight, layer.bias.double()), rtol=1e-5, atol=1e-6)


def test_static_activations_are_cut_at_their_scale() -> None:
    layer = nn.Linear(8, 4, bias=False)
    stored = quantized.QuantizedLinear(layer, form_of("int8_static", 0))
    store(stored, layer.weight, torch.tensor([1 / 127.5]))
    assert torch.equal(stored(torch.full((1, 8), 50.0)), stored(torch.full((1, 8), 1.0)))
    assert not torch.equal(stored(torch.full((1, 8), 0.5)), stored(torch.full((1, 8), 1.0)))


def test_a_group_that_fits_is_named() -> None:
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 80), nn.Linear(80, 2))
    with pytest.raises(ConfigError, match=r"quantize.group_size=16"):
        select_layers(model, QuantizeOptions(scheme="int4"), convolutions=True)
    with pytest.raises(ConfigError, match=r"quantize.skip with '0'"):
        select_layers(nn.Sequential(nn.Linear(9, 4)), QuantizeOptions(scheme="int4"), convolutions=True)


def test_what_is_shared_is_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    selection = select_layers(model, QuantizeOptions(scheme="int8"), convolutions=True)
    assert list(selection.weights) == ["1"]
    assert selection.kept == dict.fromkeys(["0", "2"], "shared with another layer")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_accelerator_computes_the_same(scheme: Scheme) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    x, weight = (torch.randint(-128, 128, (n, 264), dtype=torch.int8) for n in (40, 24))
    assert torch.equal(integer_matmul(x.to(device), weight.to(device)).cpu(), integer_matmul(x, weight))
    model, inputs = models()["classes"]
    stored = store_all(model.eval(), QuantizeOptions(scheme=scheme))
    mine = outputs(stored, inputs)
    theirs = outputs(stored.to(device), tuple(each.to(device) for each in inputs)).cpu()
    torch.testing.assert_close(theirs, mine, rtol=1e-2 if "_" in scheme else 1e-4, atol=1e-2 if "_" in scheme else 1e-5)
