"""The reference network for images against one written by hand and that of transformers, and its two norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.errors import ConfigError
from unisono.models.resnet import ResNet, ResNetOptions
from unisono.parallel.transforms import repeated_blocks

SMALL = {"depths": (1, 2), "widths": (4, 8), "classes": 5, "groups": 2}


def build(**changes: object) -> ResNet:
    """Away from initialisation, where the last norms hide their blocks."""
    torch.manual_seed(0)
    model = ResNet(ResNetOptions(**{**SMALL, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) + float("norm3.weight" in name))
    return model


def by_hand(model: ResNet, image: Tensor) -> Tensor:
    """The same from weights by name, in training mode."""
    w = dict(model.named_parameters())

    def norm(name: str, x: Tensor) -> Tensor:
        scale, shift = w[f"{name}.weight"][:, None, None], w[f"{name}.bias"][:, None, None]
        if model.options.norm == "batch":
            mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
            return (x - mean) / (variance + 1e-5).sqrt() * scale + shift
        grouped = x.unflatten(1, (model.options.groups, -1))
        mean, variance = grouped.mean((2, 3, 4), keepdim=True), grouped.var((2, 3, 4), correction=0, keepdim=True)
        return ((grouped - mean) / (variance + 1e-5).sqrt()).flatten(1, 2) * scale + shift

    stem = w["stem.weight"]
    x = F.conv2d(image, stem, stride=2 if stem.shape[-1] == 7 else 1, padding=stem.shape[-1] // 2)
    x = norm("stem_norm", x).relu()
    if stem.shape[-1] == 7:
        x = F.max_pool2d(x, 3, 2, 1)
    for number, stride in enumerate((1, 2, 1)):  # depths 1, 2: the second stage begins with block 1
        at = f"blocks.{number}"
        y = norm(f"{at}.norm1", F.conv2d(x, w[f"{at}.conv1.weight"])).relu()
        y = norm(f"{at}.norm2", F.conv2d(y, w[f"{at}.conv2.weight"], stride=stride, padding=1)).relu()
        y = norm(f"{at}.norm3", F.conv2d(y, w[f"{at}.conv3.weight"]))
        if number < 2:
            x = norm(f"{at}.shortcut_norm", F.conv2d(x, w[f"{at}.shortcut.weight"], stride=stride))
        x = (x + y).relu()
    return x.mean((2, 3)) @ w["head.weight"].mT + w["head.bias"]


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("stem", "size"), [("image", 32), ("small", 8)])
def test_equals_the_network_written_by_hand(norm: str, stem: str, size: int) -> None:
    model = build(norm=norm, stem=stem).double()
    image = torch.randn(3, 3, size, size, dtype=torch.float64)
    found = model(image)
    torch.testing.assert_close(found, by_hand(model, image), rtol=1e-9, atol=1e-9)
    model.eval()
    assert torch.allclose(model(image), found) == (norm == "group"), "batch norm evaluates with what it has seen so far"


def transformers_name(model: ResNet, name: str) -> str:
    """The name of a parameter or buffer in ResNetForImageClassification."""
    module, _, kind = name.rpartition(".")
    if module == "head":
        return f"classifier.1.{kind}"
    if module.startswith("stem"):
        return f"resnet.embedder.embedder.{'normalization' if 'norm' in module else 'convolution'}.{kind}"
    _, number, part = module.split(".")
    stage, place = 0, int(number)
    while place >= model.options.depths[stage]:
        place -= model.options.depths[stage]
        stage += 1
    what = "normalization" if "norm" in part else "convolution"
    inner = f"shortcut.{what}" if part.startswith("shortcut") else f"layer.{int(part[-1]) - 1}.{what}"
    return f"resnet.encoder.stages.{stage}.layers.{place}.{inner}.{kind}"


@pytest.mark.parametrize("training", [True, False])
def test_transformers_resnet_gives_the_same_logits(training: bool) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    model = build(depths=(2, 1, 2), widths=(8, 16, 16))
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[32, 64, 64], depths=[2, 1, 2], layer_type="bottleneck", num_labels=5
    )
    theirs = transformers.ResNetForImageClassification(config)
    image = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        model(image)  # running statistics that are not 0 and 1
        theirs.load_state_dict({transformers_name(model, n): t for n, t in model.state_dict().items()}, strict=True)
        mine, other = model.train(training)(image), theirs.train(training)(image).logits
    assert mine.std() > 0.1
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        model.blocks[-1].norm3.running_var, theirs.state_dict()[transformers_name(model, "blocks.4.norm3.running_var")]
    )


def test_resnet_50_has_its_published_size() -> None:
    with torch.device("meta"):
        model = ResNet(ResNetOptions())
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    assert len(model.blocks) == 16
    assert repeated_blocks(model) == list(model.blocks)
    image = torch.empty(1, 3, 224, 224, device="meta")
    shapes: list[tuple[int, ...]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, out: shapes.append(tuple(out.shape[1:])))
    assert model(image).shape == (1, 1000)
    assert shapes[0] == (256, 56, 56)
    assert shapes[-1] == (2048, 7, 7)


def test_a_fresh_block_is_the_identity() -> None:
    torch.manual_seed(0)
    model = ResNet(ResNetOptions(**SMALL, norm="group"))
    x = torch.randn(2, 32, 4, 4).relu()
    assert torch.equal(model.blocks[2](x), x)
    assert (model.blocks[0].norm2.weight == 1).all()
    weight = ResNet(ResNetOptions(depths=(1,), widths=(64,))).blocks[0].conv2.weight
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)


def test_with_group_norm_a_sample_does_not_depend_on_the_others() -> None:
    image = torch.randn(4, 3, 32, 32)
    group, batch = build(norm="group"), build(norm="batch")
    torch.testing.assert_close(group(image)[:2], group(image[:2]), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(batch(image)[:2], batch(image[:2]), rtol=1e-2)


def test_fewer_channels_inside_the_blocks() -> None:
    small, whole = build(inner_width=2), build()
    assert [tuple(block.conv2.weight.shape[:2]) for block in small.blocks] == [(2, 2), (4, 4), (4, 4)]
    assert small(torch.randn(2, 3, 16, 16)).shape == (2, 5)
    assert [block.conv3.weight.shape[0] for block in small.blocks] == [
        block.conv3.weight.shape[0] for block in whole.blocks
    ]
    with pytest.raises(ConfigError) as caught:
        ResNetOptions(depths=(1, 2), widths=(32, 64), norm="group", inner_width=24)
    assert caught.value.problems[0].nearest == "groups=8"


def test_sizes_that_cannot_be_built() -> None:
    with pytest.raises(ConfigError) as caught:
        ResNetOptions(depths=(1, 2), widths=(48,), norm="group")
    assert str(caught.value) == (
        "2 problems\n"
        "1. depths (1, 2) with widths (48,)\n"
        "  rule: every stage has a depth and a width, both at least 1\n"
        "  so:   the network cannot be built\n"
        "  try:  depths=(3, 4, 6, 3), widths=(64, 128, 256, 512)\n"
        "2. groups 32 with widths (48,)\n"
        "  rule: a group norm's groups have equally many channels\n"
        "  so:   48 channels cannot be normalised\n"
        "  try:  groups=24"
    )
