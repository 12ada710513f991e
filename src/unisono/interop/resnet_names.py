"""Name maps of residual networks to ``ResNetForImageClassification`` of transformers.

That class has both places of the stride (``downsample_in_bottleneck``) and no biases of convolutions. Differences that the
values make up for, in training mode as well unless said otherwise:

    a bias before a batch norm    its running mean less the bias
    epsilon of a batch norm       its running variance plus the difference; of inference only

Gluon's BottleneckV1 has its stride in the first 1x1 convolution, the others in the 3x3. MindSpore's pad_mode "same" pads below
and on the right where the stride is 2 and the side even, torch above and on the left; with odd sides both pad evenly.

Source:
    mxnet.gluon.model_zoo.vision.resnet of MXNet 1.9, gluoncv.model_zoo.resnetv1b, official/cv/ResNet of mindspore-ai/models,
    mindcv.models.resnet: names, strides, paddings and epsilons.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from unisono.interop.name_map import Files, Found, NameMap, Place, Setting, refused, under_own_names

_EPS: Final = 1e-5  # of the class's batch norms
_REDUCTION: Final = 4  # channels of a bottleneck block per channel of its 3x3 convolution, in the class
_GLUON: Final = ("gamma", "beta", "running_mean", "running_var")
_MINDSPORE: Final = ("gamma", "beta", "moving_mean", "moving_variance")
_CLASS: Final = ("weight", "bias", "running_mean", "running_var")
_SIZE: Final = "image_size"
_SIZE_RULE: Final = (
    "it must be given: weights do not tell the side of the images, on which the padding of MindSpore depends"
)
_FIRST: Final = re.compile(r"resnet\.encoder\.stages\.(\d+)\.layers\.\d+\.layer\.0\.convolution\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Names:
    """Names of a library's modules.

    Attributes:
        stem: Its convolution and norm.
        block: Stage and number of a block → what its names begin with.
        unit: Number of a convolution in a block → it and its norm.
        shortcut: Convolution and norm of a projection, in a block.
        head: The last layer.
        norm: The four tensors of a norm.
        eps: Whether the norm is in a block's branch → its epsilon.
    """

    stem: tuple[str, str]
    block: Callable[[int, int], str]
    unit: Callable[[int], tuple[str, str]]
    shortcut: tuple[str, str]
    head: str
    norm: tuple[str, str, str, str]
    eps: Callable[[bool], float] = lambda _in_branch: _EPS


def _layers(stem: tuple[str, str], shortcut: str, head: str, norm: tuple[str, str, str, str], **other: Any) -> _Names:
    """Names as torchvision's: ``layer1.0.conv1``."""
    return _Names(
        stem=stem,
        block=lambda stage, number: f"layer{stage + 1}.{number}.",
        unit=other.pop("unit", lambda number: (f"conv{number + 1}", f"bn{number + 1}")),
        shortcut=(f"{shortcut}.0", f"{shortcut}.1"),
        head=head,
        norm=norm,
        **other,
    )


_ZOO: Final = _Names(
    stem=("features.0", "features.1"),
    block=lambda stage, number: f"features.{stage + 4}.{number}.",
    unit=lambda number: (f"body.{3 * number}", f"body.{3 * number + 1}"),
    shortcut=("downsample.0", "downsample.1"),
    head="output",
    norm=_GLUON,
)
_STEM: Final = ("conv1", "bn1")
_GLUONCV: Final = _layers(_STEM, "downsample", "fc", _GLUON)
_MODELS: Final = _layers(_STEM, "down_sample_layer", "end_point", _MINDSPORE, eps=lambda _in_branch: 1e-4)
_MODELS_BASIC: Final = _layers(
    _STEM,
    "down_sample_layer",
    "end_point",
    _MINDSPORE,
    unit=lambda number: (f"conv{number + 1}", f"bn{number + 1}d"),
    eps=lambda in_branch: 1e-4 if in_branch else _EPS,
)
_MINDCV: Final = _layers(_STEM, "down_sample", "classifier", _MINDSPORE)


def _places(names: _Names, stored: Files) -> list[Place]:
    """The class's tensors for as many stages and blocks as the file has."""
    places = list(_unit(names, stored, "resnet.embedder.embedder", names.stem, ("stem", "image channels", 7, 7), False))
    first, stage, before = names.unit(0)[0], 0, "stem"
    while f"{names.block(stage, 0)}{first}.weight" in stored:
        number, out = 0, f"channels of stage {stage}"
        while f"{names.block(stage, number)}{first}.weight" in stored:
            prefix, target = names.block(stage, number), f"resnet.encoder.stages.{stage}.layers.{number}"
            for unit, shape in enumerate(_shapes(names, stored, prefix, stage, before)):
                modules = tuple(prefix + module for module in names.unit(unit))
                places += _unit(names, stored, f"{target}.layer.{unit}", (modules[0], modules[1]), shape, True)
            shortcut = (prefix + names.shortcut[0], prefix + names.shortcut[1])
            if number == 0 and (stage or f"{shortcut[0]}.weight" in stored):
                places += _unit(names, stored, f"{target}.shortcut", shortcut, (out, before, 1, 1), False)
            number, before = number + 1, out
        stage += 1
    places.append(Place(name="classifier.1.weight", shape=("classes", before), sources=(f"{names.head}.weight",)))
    places.append(Place(name="classifier.1.bias", shape=("classes",), sources=(f"{names.head}.bias",)))
    return places


def _is_bottleneck(names: _Names, stored: Files, prefix: str) -> bool:
    return f"{prefix}{names.unit(2)[0]}.weight" in stored


def _shapes(
    names: _Names, stored: Files, prefix: str, stage: int, before: str
) -> list[tuple[str | int, str | int, int, int]]:
    """Shapes of the convolutions of a block."""
    out, width = f"channels of stage {stage}", f"width of stage {stage}"
    if _is_bottleneck(names, stored, prefix):
        return [(width, before, 1, 1), (width, width, 3, 3), (out, width, 1, 1)]
    return [(out, before, 3, 3), (out, out, 3, 3)]


def _unit(
    names: _Names,
    stored: Files,
    target: str,
    modules: tuple[str, str],
    shape: tuple[str | int, ...],
    in_branch: bool,
) -> Iterator[Place]:
    """A convolution and its norm.

    Args:
        names: The library's names.
        stored: The file's tensors.
        target: The unit's name in the class.
        modules: Convolution and norm in the file.
        shape: Of the convolution's weight.
        in_branch: Whether it is in the branch of a block, not the stem or a projection.
    """
    convolution, norm = modules
    yield Place(name=f"{target}.convolution.weight", shape=shape, sources=(f"{convolution}.weight",))
    bias, eps = f"{convolution}.bias", names.eps(in_branch)
    for own, theirs in zip(names.norm, _CLASS, strict=True):
        place = partial(Place, name=f"{target}.normalization.{theirs}", shape=shape[:1])
        if theirs == "running_mean" and bias in stored:
            yield place(sources=(f"{norm}.{own}", bias), make=_less)
        elif theirs == "running_var" and eps != _EPS:
            yield place(sources=(f"{norm}.{own}",), make=partial(_plus, number=eps - _EPS))
        else:
            yield place(sources=(f"{norm}.{own}",))
    yield Place(name=f"{target}.normalization.num_batches_tracked", shape=(), sources=(), make=_zero)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype.itemsize >= 4 else values.float()


def _less(mean: Tensor, bias: Tensor) -> Tensor:
    return _wide(mean) - _wide(bias)


def _plus(variance: Tensor, number: float) -> Tensor:
    return _wide(variance) + number


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _config(found: Found, *, label: str, stride_first: bool, odd: Literal["all", "stem", "none"]) -> dict[str, Any]:
    """Content of ``config.json``.

    Args:
        found: The file.
        label: The map's.
        stride_first: Whether the stride of a bottleneck block is in its first convolution.
        odd: Which sides must be odd: of the input of every module with a stride, of the pooling alone, or none.
    """
    sizes = found.sizes
    blocks = Counter(match[1] for name in found.places if (match := _FIRST.fullmatch(name)))
    depths = [blocks[number] for number in sorted(blocks, key=int)]
    stages = len(depths)
    bottleneck = "resnet.encoder.stages.0.layers.0.layer.2.convolution.weight" in found.places
    hidden = [sizes[f"channels of stage {stage}"] for stage in range(stages)]
    projected = "resnet.encoder.stages.0.layers.0.shortcut.convolution.weight" in found.places
    if projected != (sizes["stem"] != hidden[0]):
        raise refused(
            label,
            f"a first stage {'with' if projected else 'without'} a projection, from {sizes['stem']} to {hidden[0]} channels",
            rule="a block of the class has a projection where its channels or size change, and only there",
            nearest="the file under its own names, without --as, for a model of your own",
        )
    narrow = [sizes[f"width of stage {stage}"] for stage in range(stages)] if bottleneck else []
    if bottleneck and any(out != _REDUCTION * width for out, width in zip(hidden, narrow, strict=True)):
        raise refused(
            label,
            f"3x3 convolutions of {narrow} channels in stages of {hidden}",
            rule=f"a block of the class has {_REDUCTION} channels per channel of its 3x3 convolution",
            nearest="the file under its own names, without --as, for a model of your own",
        )
    if odd != "none":
        _check_side(label, found.settings[_SIZE], stages, odd == "all")
    return {
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        "num_channels": sizes["image channels"],
        "embedding_size": sizes["stem"],
        "hidden_sizes": hidden,
        "depths": depths,
        "layer_type": "bottleneck" if bottleneck else "basic",
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": stride_first,
        "num_labels": sizes["classes"],
    } | ({_SIZE: found.settings[_SIZE]} if odd != "none" else {})


def _check_side(label: str, side: int, stages: int, everywhere: bool) -> None:
    """Refuse images that the class pads elsewhere than the model does."""
    sides = [side, (side + 1) // 2]  # of the stem's convolution and of the pooling after it
    for _ in range(stages - 1):
        sides.append((sides[-1] + 1) // 2)  # of the strided convolution of each stage after the first
    wrong = [each for each in (sides if everywhere else sides[1:2]) if each % 2 == 0]
    if wrong:
        step = 2 ** (stages + 1) if everywhere else 4
        near = max(1, round((side - 1) / step)) * step + 1
        raise refused(
            label,
            f"{_SIZE}={side}, whose {'images are' if wrong[0] == side else 'features become'} {wrong[0]} wide",
            rule="where a stride meets an even side, MindSpore's 'same' pads below and on the right, and torch above and on the "
            "left: outputs would differ",
            nearest=f"--set {_SIZE}={near}, 1 more than a multiple of {step}, if the model will see images of that size",
        )


def _find(anchors: tuple[str, ...], without: tuple[str, ...], tensors: Files) -> dict[str, str] | None:
    present = all(name in tensors for name in anchors) and not any(name in tensors for name in without)
    return under_own_names(tensors) if present else None


def _find_symbolic(tensors: Files) -> dict[str, str] | None:
    """The names of ``HybridBlock.export``, which count layers, and those of ``save_params``, as names of ``save_parameters``."""
    first = next((name for name in tensors if name.endswith("stage1_conv0_weight")), None)
    if first is None:
        return None
    begin = first.removesuffix("stage1_conv0_weight")
    if f"{begin}conv0_weight" not in tensors:
        return None
    modules = {f"{begin}conv0": "features.0", f"{begin}batchnorm0": "features.1", f"{begin}dense0": "output"}
    stage, units = 1, 3 if tensors[first].shape[2:] == (1, 1) else 2
    while f"{begin}stage{stage}_conv0_weight" in tensors:
        stem, number, block = f"{begin}stage{stage}_", 0, 0
        while f"{stem}conv{number}_weight" in tensors:
            parts = [f"body.{3 * unit}" for unit in range(units)]
            parts += ["downsample.0"] if block == 0 and _is_projection(stem, units, tensors) else []
            for part in parts:
                target = f"features.{stage + 3}.{block}."
                module, place = part.rsplit(".", 1)
                modules[f"{stem}conv{number}"] = target + part
                modules[f"{stem}batchnorm{number}"] = f"{target}{module}.{int(place) + 1}"
                number += 1
            block += 1
        stage += 1
    names: dict[str, str] = {}
    for name in tensors:
        match = re.fullmatch(r"(.*?)_(weight|bias|gamma|beta|running_mean|running_var)", name)
        own = f"{modules[match[1]]}.{match[2]}" if match and match[1] in modules else name
        names[own if own not in names else name] = name
    return names


def _is_projection(stem: str, units: int, tensors: Files) -> bool:
    """Whether the convolution after the first block's own is a projection, and not the next block's first."""
    shapes = [tensors[name].shape if (name := f"{stem}conv{n}_weight") in tensors else () for n in (units - 1, units)]
    return shapes[1][2:] == (1, 1) and shapes[1][:1] == shapes[0][:1]


def _map(
    label: str,
    names: _Names,
    find: Callable[[Files], dict[str, str] | None],
    *,
    stride_first: bool = False,
    odd: Literal["all", "stem", "none"] = "none",
) -> NameMap:
    return NameMap(
        family="resnet",
        label=label,
        find=find,
        places=partial(_places, names),
        config=partial(_config, label=label, stride_first=stride_first, odd=odd),
        settings=() if odd == "none" else (Setting(name=_SIZE, kind=int, rule=_SIZE_RULE),),
    )


def _with(*anchors: str, without: tuple[str, ...] = ()) -> Callable[[Files], dict[str, str] | None]:
    return partial(_find, anchors, without)


_THIRD: Final = "layer1.0.conv3.weight"
RESNET_MAPS: Final = (
    _map(
        "ResNet v1 of Gluon's model zoo",
        _ZOO,
        _with("features.0.weight", "features.4.0.body.0.weight", "output.weight"),
        stride_first=True,
    ),
    _map("ResNet v1 of Gluon's model zoo, as export() names it", _ZOO, _find_symbolic, stride_first=True),
    _map(
        "ResNet v1b of GluonCV", _GLUONCV, _with("conv1.weight", "bn1.running_mean", "fc.weight", "layer1.0.bn1.gamma")
    ),
    _map(
        "basic ResNet of mindspore/models",
        _MODELS_BASIC,
        _with("bn1.moving_mean", "end_point.weight", without=(_THIRD,)),
    ),
    _map(
        "bottleneck ResNet of mindspore/models",
        _MODELS,
        _with("bn1.moving_mean", "end_point.weight", _THIRD),
        odd="all",
    ),
    _map("ResNet of MindCV", _MINDCV, _with("bn1.moving_mean", "classifier.weight", "layer1.0.bn1.gamma"), odd="stem"),
)
