"""Quantizes a trained model: weights to int8 or int4, activations by scales from training samples, and what each layer costs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from unisono.errors import ConfigError
from unisono.models.quantize_options import QuantizeOptions
from unisono.models.quantized import ACTIVATION_STEPS, Stored, from_integers, scale_of, store, unpack
from unisono.models.quantized_model import make_stored, select_layers, store_layer
from unisono.models.weight_reads import refuse_reads
from unisono.train.build import has_quantized_convolutions
from unisono.train.objectives import Batch
from unisono.train.trained import TrainedRun
from unisono.train.whole_model import saved_names

_BINS: Final = 4096  # of a layer's inputs, from 0 to the largest


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """How the scales of static activations are found.

    Attributes:
        samples: Samples of ``TrainedRun.training_batches`` whose inputs of each layer are seen; at most an epoch.
        percentile: Percent of a layer's inputs that its scale spans; the others are cut. 100 = all of them.
    """

    samples: int
    percentile: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFacts:
    """A quantized layer.

    Attributes:
        name: Its name in the model.
        bits: Bits of a weight.
        bytes_before: Bytes of its weight as it was.
        bytes_after: Bytes of integers and scales.
        relative_error: Norm of the change of the weight over the norm of the weight.
        input_scale: Scale of static activations; None of others.
    """

    name: str
    bits: int
    bytes_before: int
    bytes_after: int
    relative_error: float
    input_scale: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptFacts:
    """Tensors that are stored as they were, for one reason."""

    reason: str
    tensors: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Held-out loss with one layer quantized alone, and its change."""

    layer: str
    loss: float
    change: float


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedModel:
    """The result: ``model`` with stored layers, each layer, and what was kept."""

    model: nn.Module
    layers: tuple[LayerFacts, ...]
    kept: tuple[KeptFacts, ...]

    def facts(self) -> dict[str, Any]:
        """Layers and kept tensors as JSON types."""
        return {"layers": [asdict(layer) for layer in self.layers], "kept": [asdict(kept) for kept in self.kept]}

    def rows(self) -> Iterator[str]:
        """Lines about what was quantized and what was kept."""
        before, after = (sum(getattr(layer, f"bytes_{when}") for layer in self.layers) for when in ("before", "after"))
        yield f"quantized {len(self.layers)} layers: {before / 2**20:.2f} MiB of weights are {after / 2**20:.2f} MiB now"
        for kept in self.kept:
            yield f"kept {kept.tensors} tensor{'s' if kept.tensors > 1 else ''} of {kept.bytes / 2**20:.2f} MiB: {kept.reason}"


def quantize_model(run: TrainedRun, options: QuantizeOptions, calibration: Calibration) -> QuantizedModel:
    """Quantize a copy of the run's model.

    Args:
        run: The run, opened with its training data.
        options: The scheme; not "none".
        calibration: For static activations.

    Raises:
        ConfigError: No layer is left, a pattern matches none, a group does not fit, a weight or an input is not finite, no sample
            reaches a layer with static activations, or the model's code reads the weight of a layer itself.
    """
    convolutions = has_quantized_convolutions(run.config)
    model = copy.deepcopy(run.model)
    stored = make_stored(model, options, convolutions=convolutions)
    selection = select_layers(run.model, options, convolutions=convolutions)
    for name, weight in selection.weights.items():
        _require_finite(name, "weight", weight)
    is_static = options.scheme == "int8_static"
    for name, layer in stored.items():
        store(layer, selection.weights[name], torch.ones(1) if is_static else None)
    _try(run, model)
    scales: Mapping[str, Tensor] = {}
    if is_static:
        scales = _input_scales(run, list(selection.weights), calibration)
    layers: list[LayerFacts] = []
    for name, layer in stored.items():
        weight = selection.weights[name]
        if name in scales:
            store(layer, weight, scales[name])
        layers.append(
            LayerFacts(
                name=name,
                bits=layer.form.bits,
                bytes_before=weight.nbytes,
                bytes_after=layer.weight_packed.nbytes + layer.weight_scale.nbytes,
                relative_error=_relative_error(layer, weight),
                input_scale=float(scales[name]) if name in scales else None,
            )
        )
    return QuantizedModel(
        model=model, layers=tuple(layers), kept=tuple(_kept(run.model, selection.weights, selection.kept))
    )


@torch.no_grad()
def _try(run: TrainedRun, model: nn.Module) -> None:
    """Raise ConfigError if the code of ``model`` reads weights that are not there any more. One pass of a micro-batch."""
    with refuse_reads(model, consequence="nothing could compute with the model; nothing was written", skip="--skip"):
        run.forward_backward(model).evaluate([run.held_out_batch()], _no_more)


def sensitivities(
    run: TrainedRun, options: QuantizeOptions, quantized: QuantizedModel, samples: int
) -> list[Sensitivity]:
    """The held-out loss with each layer quantized alone, the layer that costs most first.

    Args:
        run: The run.
        options: The scheme.
        quantized: The model of ``quantize_model``, whose scales of activations are taken.
        samples: Held-out samples of each evaluation; 0 = all.
    """
    before = run.evaluate(run.model, samples)["loss"]
    found: list[Sensitivity] = []
    for facts in quantized.layers:
        model = copy.deepcopy(run.model)
        layer = store_layer(model, facts.name, options)
        layer.load_state_dict(_buffers(quantized.model.get_submodule(facts.name)), strict=False)
        loss = run.evaluate(model, samples)["loss"]
        found.append(Sensitivity(layer=facts.name, loss=loss, change=loss - before))
    return sorted(found, key=lambda each: -each.change)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers())


def _relative_error(layer: Stored, weight: Tensor) -> float:
    packed = layer.weight_packed
    rows = unpack(packed.flatten(1) if packed.dim() == 4 else packed, layer.form)
    stored = from_integers(rows, layer.weight_scale, layer.form).view(weight.shape)
    norm = float(weight.detach().float().norm())
    return float((stored - weight.detach().float()).norm()) / norm if norm else 0.0


def _kept(model: nn.Module, chosen: Mapping[str, Tensor], kept: Mapping[str, str]) -> Iterator[KeptFacts]:
    """The tensors that stay as they are, by reason: most bytes first."""
    reasons: dict[str, list[int]] = {}
    first, stored = saved_names(model), {id(weight) for weight in chosen.values()}
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first[name] == name and id(tensor) not in stored:
            layer = name if name in kept else name.rpartition(".")[0]
            reason = kept.get(layer) or ("a table of embeddings" if layer in tables else _other(model, layer, tensor))
            reasons.setdefault(reason, []).append(tensor.nbytes)
    for reason, sizes in sorted(reasons.items(), key=lambda item: -sum(item[1])):
        yield KeptFacts(reason=reason, tensors=len(sizes), bytes=sum(sizes))


def _other(model: nn.Module, layer: str, tensor: Tensor) -> str:
    """Why a tensor of the module ``layer`` is kept: matrices are named by the kind of module that has them."""
    if tensor.dim() < 2:
        return "biases, norms and others"
    modules = dict(model.named_modules())
    owner, parent = modules.get(layer, model), modules.get(layer.rpartition(".")[0])
    owner = parent if isinstance(parent, nn.MultiheadAttention) else owner  # its out_proj is a part of it
    return f"weights of {type(owner).__name__}, which no scheme covers"


# --- calibration -----------------------------------------------------------------------------------------------------


def _input_scales(run: TrainedRun, names: list[str], calibration: Calibration) -> dict[str, Tensor]:
    """The scale [1] of the inputs of each layer. Raises ConfigError for a layer that no sample reaches."""
    largest: dict[str, Tensor] = {}

    def note_largest(name: str, x: Tensor) -> None:
        if x.numel():
            found = x.abs().amax()
            largest[name] = torch.maximum(largest[name], found) if name in largest else found

    _watch(run, names, calibration.samples, note_largest)
    for name in names:
        if name not in largest:
            raise _unreached(name, calibration.samples)
        _require_finite(name, "input", largest[name])
    if calibration.percentile < 100:
        counts = {name: torch.zeros(_BINS, dtype=torch.int64, device=run.device) for name in names}

        def count(name: str, x: Tensor) -> None:
            bins = (x.abs() * (_BINS / max(float(largest[name]), 1e-30))).long().clamp(max=_BINS - 1)
            counts[name] += torch.bincount(bins.flatten(), minlength=_BINS)  # torch.histc stops at 2^24 in float32

        _watch(run, names, calibration.samples, count)
        for name, found in counts.items():
            below = found.double().cumsum(0) / found.sum()
            place = int((below < calibration.percentile / 100).sum())
            largest[name] = largest[name] * (min(place, _BINS - 1) + 1) / _BINS
    return {name: scale_of(value, ACTIVATION_STEPS).reshape(1) for name, value in largest.items()}


def _unreached(name: str, samples: int) -> ConfigError:
    return ConfigError(
        given=f"the layer {name}, which none of {samples} calibration samples reaches",
        rule="static activations have the scale of the inputs that the layer had",
        consequence="its scale would be a guess; nothing was written",
        nearest=f"more --calibration-samples, --skip {name!r}, or --scheme int8_dynamic",
    )


def _watch(run: TrainedRun, names: list[str], samples: int, see: Any) -> None:
    """Call ``see(name, input)`` for the input of each named layer, in passes over training samples."""
    passes = run.forward_backward(run.model)

    def hook(name: str) -> Any:
        def of_layer(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            see(name, cast(Tensor, inputs[0]).detach().float())

        return of_layer

    with ExitStack() as stack, torch.no_grad():
        for name in names:
            handle = run.model.get_submodule(name).register_forward_pre_hook(hook(name))
            stack.callback(handle.remove)
        for batch in run.training_batches(samples):
            passes.evaluate([batch], _no_more)


def _no_more(_number: int, _outputs: Any, _batch: Batch) -> None:
    """The outputs are not needed."""


def _require_finite(name: str, what: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):
        raise ConfigError(
            given=f"the {what} of {name}, which has values that are no finite numbers",
            rule="a scale spans all values of a row, a group or a layer",
            consequence="its numbers would be lost; nothing was written",
            nearest="a checkpoint before the values became infinite or NaN (--checkpoint), or --skip for this layer",
        )
