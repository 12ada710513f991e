"""Taps: at a cadence, statistics of the outputs, gradients and parameters of the modules that a pattern names.

At a tapped step forward hooks and gradient hooks are installed for that step alone; every other step costs nothing. The figures
are of the global batch and the global tensors, whatever the layout: micro-batches and data ranks are added up, shards of
parameters too. Of an output that several tensor-parallel ranks hold, equal copies (same bits) count once. A reading waits for the
device.

With ``plan.compile`` a tapped step runs without compiled code, because hooks do not act inside of it; it rounds differently.
In a pipeline, modules outside of the blocks are tapped if all their parameters are of one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.errors import ConfigError, nearest_name
from unisono.observe.events import EventLog
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.stages import PipelineStages
from unisono.parallel.sharding import ShardedParameters
from unisono.plan.rules import match_modules
from unisono.train.tensor_digest import tensor_digest

_ENTRIES_PER_EVENT: Final = 500  # modules or parameters: an event has at most 1 MiB
_DATA_AXES: Final = ("shard", "dp_replicate")  # their ranks compute different samples or different parts of a sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class TapTarget:
    """The model and the ranks that taps observe.

    Attributes:
        model: This rank's part of the model.
        paths: Names of the modules of the global model.
        sharded: This rank's parameters.
        dims: The mesh of the ranks.
        stages: This rank's pipeline stages, if there are any.
        ranks_diverge: Whether each rank has parameters of its own, and reports its own figures.
        updates_here: Whether the optimizer moves the parameters in the step, and not a server later.
    """

    model: nn.Module
    paths: tuple[str, ...]
    sharded: ShardedParameters
    dims: ParallelDims
    stages: PipelineStages | None
    ranks_diverge: bool
    updates_here: bool


class Taps:
    """The taps of a run, which ``reading`` turns into the hooks of one step."""

    def __init__(self, target: TapTarget, events: EventLog) -> None:
        self._target, self._events = target, events
        self._entries: list[tuple[int, frozenset[str]]] = []  # cadence, names of modules

    def add(self, patterns: Sequence[str], every: int) -> None:
        """Tap the modules that match ``patterns`` each ``every`` steps. Raises ConfigError for a pattern without a match."""
        chosen: set[str] = set()
        for pattern in patterns:
            names = match_modules(pattern, self._target.paths)
            if not names:
                raise ConfigError(
                    given=f"a tap of {pattern!r}",
                    rule="it names modules of the model; * is one part of a name, and ** any number of them",
                    consequence="it would observe nothing",
                    nearest=nearest_name(pattern, self._target.paths),
                )
            chosen.update(names)
        if every < 1:
            raise ConfigError(
                given=f"a tap every {every} steps",
                rule="the cadence is a number of steps, at least 1",
                consequence="nothing was tapped",
                nearest="every=100",
            )
        self._entries.append((every, frozenset(chosen)))

    def silent(self) -> Taps:
        """The same taps without their events, for a step that is computed again: it runs the same operators."""
        taps = Taps(self._target, cast(EventLog, _NoEvents()))
        taps._entries = self._entries
        return taps

    def reading(self, step: int) -> TapReading | None:
        """The reading of ``step``, from 0; None where no tap is due."""
        due = [names for every, names in self._entries if (step + 1) % every == 0]
        return TapReading(self._target, self._events, frozenset().union(*due)) if due else None


class _NoEvents:
    def emit(self, kind: str, **fields: Any) -> None: ...


class _Figures:
    """Sums and extremes of the tensors of one place, over the calls of a step; all on the device."""

    def __init__(self, device: torch.device) -> None:
        exact = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(4, dtype=exact, device=device)  # squares, elements, zeros, non-finite values
        self.extremes = torch.full((2,), -torch.inf, dtype=exact, device=device)  # maximum, -minimum
        self.alive = torch.zeros(0, device=device)  # [channels], 1 where any element is not zero
        self.checksum = torch.zeros((), dtype=torch.int64, device=device)
        self.shape: tuple[int, ...] = ()
        self.dtype = ""

    @torch.no_grad()
    def add(self, given: Tensor, *, with_checksum: bool = False) -> None:
        """Take a tensor; one that is a DTensor is gathered."""
        tensor = (given.full_tensor() if isinstance(given, DTensor) else given).detach()
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if not tensor.numel():
            return
        wide = tensor.float() if tensor.dtype.itemsize < 4 else tensor
        zeros = wide == 0
        dtype, device = self.sums.dtype, self.sums.device
        squares = torch.linalg.vector_norm(wide).to(dtype).square()
        count = torch.tensor(tensor.numel(), dtype=dtype, device=device)
        self.sums += torch.stack([squares, count, zeros.sum().to(dtype), (~wide.isfinite()).sum().to(dtype)])
        largest, smallest = wide.amax().to(dtype), wide.amin().to(dtype)
        self.extremes = torch.maximum(self.extremes, torch.stack([largest, -smallest]))
        if tensor.dim() > 1:
            channel = 1 if tensor.dim() > 3 else tensor.dim() - 1  # [B, C, H, W] and [B, C, D, H, W]; else the last
            alive = (~zeros).movedim(channel, 0).flatten(1).any(1).float()
            self.alive = torch.maximum(self.alive, alive) if self.alive.shape == alive.shape else alive
        if with_checksum:
            self.checksum = self.checksum * 31 + tensor_digest(tensor)


class TapReading:
    """The hooks and figures of one tapped step: a context around its passes, then ``before_update`` and ``emit``."""

    def __init__(self, target: TapTarget, events: EventLog, names: frozenset[str]) -> None:
        self._target, self._events = target, events
        self._modules = {path: module for path, module in self._local(names)}
        live = target.sharded.parameters
        prefixes = tuple(f"{name}." for name in names)
        self._parameters = {name: live[name] for name in live if name.startswith(prefixes)}
        device = next((p.device for p in live.values()), torch.device("cpu"))
        self._outputs = {path: _Figures(device) for path in self._modules}
        self._gradients = {path: _Figures(device) for path in self._modules}
        self._checksums = target.dims.sizes["tp"] > 1
        self._in_forward = False
        self._length = 0  # of the sequences that the model gets
        self._stack = ExitStack()
        self._of_parameters: dict[str, dict[str, Any]] = {}
        self._before: dict[str, Tensor] = {}
        self._divisor: Tensor | None = None

    def _local(self, names: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
        """The modules of this rank that the taps name, in the model's order."""
        for path, module in self._target.model.named_modules():
            if path in names and (self._target.stages is None or self._stage_of(path) in self._target.stages.stage_ids):
                yield path, module

    def _stage_of(self, path: str) -> int | None:
        """The pipeline stage whose call of the module counts; None where no single one does."""
        assert self._target.stages is not None
        layout = self._target.stages.partition
        for number, block in enumerate(layout.blocks):
            if path == block or path.startswith(f"{block}."):
                return next(n for n in range(self._target.stages.num_stages) if number in layout.blocks_of_stage(n))
        first = {stages[0] for name, stages in layout.stages_of_parameter.items() if name.startswith(f"{path}.")}
        return first.pop() if len(first) == 1 else None

    # --- hooks -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> TapReading:
        model, stages = self._target.model, self._target.stages

        def begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._in_forward = True
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 1]
            self._length = max((tensor.shape[1] for tensor in tensors), default=0)

        def end(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._in_forward = False  # recompute calls modules again, in the backward pass

        hooks = [model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)]
        for path, module in self._modules.items():
            stage = None if stages is None else self._stage_of(path)
            hooks.append(module.register_forward_hook(self._observer(path, stage)))
        hooks.append(model.register_forward_hook(end, always_call=True))
        for hook in hooks:
            self._stack.callback(hook.remove)
        if self._target.dims.plan.backend.compile != "off":
            self._stack.enter_context(cast(Any, torch.compiler.set_stance("force_eager")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _observer(self, path: str, stage: int | None) -> Callable[..., None]:
        outputs, gradients, stages = self._outputs[path], self._gradients[path], self._target.stages

        def observe(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self._in_forward or (stages is not None and stages.active_stage != stage):
                return
            tensor = first_floating(output)
            if tensor is None:
                return
            outputs.add(tensor, with_checksum=self._checksums)
            if tensor.requires_grad:
                tensor.register_hook(observe_gradient)

        def observe_gradient(gradient: Tensor | None) -> None:
            if gradient is not None:  # a pipeline may compute gradients of inputs and of parameters in two passes
                gradients.add(gradient, with_checksum=self._checksums)

        return observe

    # --- figures -----------------------------------------------------------------------------------------------------

    def before_update(self, gradients: Sequence[Tensor], divisor: Tensor) -> None:
        """Read the parameters and their reduced ``gradients``, in order of the trained ones.

        ``divisor`` [] turns gradients into those of the mean loss.
        """
        live = self._target.sharded.parameters
        trained = dict(zip([name for name, p in live.items() if p.requires_grad], gradients, strict=True))
        self._divisor = divisor.double() if divisor.device.type != "mps" else divisor
        one = torch.ones_like(self._divisor)
        for name, figures in self._of_shards(self._parameters, one).items():
            self._of_parameters[name] = figures
        chosen = {name: trained[name] for name in self._parameters if name in trained}
        for name, figures in self._of_shards(chosen, self._divisor).items():
            self._of_parameters[name]["gradient"] = figures
        if self._target.updates_here:
            self._before = {name: live[name].detach().clone() for name in chosen}

    @torch.no_grad()
    def emit(self, step: int, good: Tensor) -> None:
        """Write the events of ``step``, from 1, after the update; ``good`` [] bool: whether the step counts."""
        target = self._target
        if self._before:
            parameters = [self._parameters[name] for name in self._before]
            moved = [p.float() - before.float() for p, before in zip(parameters, self._before.values(), strict=True)]
            norms = [self._norms(parameters, tensors) for tensors in (moved, list(self._before.values()))]
            for name, update, weight in zip(self._before, *norms, strict=True):
                self._of_parameters[name]["update_frac"] = update / weight if weight > 0 else None
        assert self._divisor is not None
        outputs = self._of_outputs(self._outputs, torch.ones_like(self._divisor), with_dead=True)
        gradients = self._of_outputs(self._gradients, self._divisor, with_dead=False)
        modules: dict[str, dict[str, Any]] = {}
        for path, figures in outputs.items():
            gradient, modules[path] = gradients.get(path), {"output": figures}
            num_parts = figures.pop("num_parts")
            # of an output that several ranks hold, each may have computed a part of the gradient: their sum is not known here
            if gradient is not None and gradient.pop("num_parts") == num_parts:
                modules[path]["gradient"] = gradient
        parameters, skipped = target.sharded.gather_stages(self._of_parameters), not bool(good)
        if target.stages is not None:
            merged = {
                path: figures for stage in target.dims.world.all_gather_json(modules) for path, figures in stage.items()
            }
            modules = {path: merged[path] for path in target.paths if path in merged}
        if target.dims.world.rank and not target.ranks_diverge:
            return
        chunks = (_chunks(modules), _chunks(parameters))
        for number in range(max(map(len, chunks))):
            fields = [chunk[number] if number < len(chunk) else {} for chunk in chunks]
            self._events.emit("tap", step=step, skipped=skipped, modules=fields[0], parameters=fields[1])

    def _norms(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> list[float]:
        local = torch.stack(
            [torch.linalg.vector_norm(t.float() if t.dtype.itemsize < 4 else t).float() for t in tensors]
        )
        return self._target.sharded.global_norms(parameters, local).tolist()

    @torch.no_grad()
    def _of_shards(self, tensors: Mapping[str, Tensor], divisor: Tensor) -> dict[str, dict[str, Any]]:
        """Figures of global tensors from this rank's shards of them, by name of the parameter."""
        if not tensors:
            return {}
        sharded = self._target.sharded
        parts = {name: _Figures(tensor.device) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            parts[name].add(tensor)
        parameters = [sharded.parameters[name] for name in tensors]
        sums = torch.stack([part.sums for part in parts.values()])  # [n, 4]
        sums = torch.stack([sharded.sum_over_shards(parameters, column.contiguous()) for column in sums.unbind(1)], 1)
        extremes = torch.stack([part.extremes for part in parts.values()])  # [n, 2]
        extremes = sharded.max_over_shards(extremes.flatten()).view_as(extremes)
        found = _as_rows(parts, sums, extremes, divisor)
        for name, figures in found.items():
            figures["shape"] = sharded.global_shape(name)
        return found

    @torch.no_grad()
    def _of_outputs(
        self, parts: Mapping[str, _Figures], divisor: Tensor, *, with_dead: bool
    ) -> dict[str, dict[str, Any]]:
        """Figures of the global batch, by name of the module; without modules that were not called."""
        if not parts:
            return {}
        places, dims = list(parts.values()), self._target.dims
        sums = torch.stack([part.sums for part in places])  # [n, 4]
        extremes = torch.stack([part.extremes for part in places])  # [n, 2]
        alive = self._alive_channels(places) if with_dead else [part.alive for part in places]
        channels = torch.tensor(
            [[float(len(row)), float((row == 0).sum())] for row in alive], dtype=sums.dtype, device="cpu"
        )
        counts_here = self._is_first_copy(places)
        parts_here = counts_here[:, None].to(sums.dtype)
        channels = channels.to(sums.device) * ~self._is_sequence_part(places, first_rank_counts=True)[:, None]
        sums = torch.cat([torch.cat([sums, channels], 1) * parts_here, parts_here], 1)  # [n, 7]
        if not self._target.ranks_diverge:
            sums = dims.sum(sums, "tp")
            channels = sums[:, 4:].clone()  # data ranks agree on these
            extremes = dims.max(extremes.flatten(), "tp").view_as(extremes)
            for axis in _DATA_AXES:
                sums = dims.sum(sums, axis)
                extremes = dims.max(extremes.flatten(), axis).view_as(extremes)
        else:
            channels = sums[:, 4:]
        found = _as_rows(parts, sums[:, :4], extremes, divisor)
        for (path, figures), (count, dead, num_parts) in zip(found.items(), channels.tolist(), strict=True):
            figures["shape"] = list(parts[path].shape)  # of one call on this rank
            figures["num_parts"] = num_parts
            if with_dead and count:
                figures["dead_frac"] = dead / count
        return {path: figures for path, figures in found.items() if figures["numel"]}

    def _is_first_copy(self, places: Sequence[_Figures]) -> Tensor:
        """Whether no earlier tensor-parallel rank has the same bits [n]."""
        dims = self._target.dims
        mine = torch.stack([part.checksum for part in places])
        if dims.sizes["tp"] == 1:
            return torch.ones_like(mine, dtype=torch.bool)
        table, rank = mine.new_zeros(dims.sizes["tp"], len(places)), dims.rank_along("tp")
        table[rank] = mine
        table = dims.sum(table, "tp")
        return ~(table[:rank] == mine).any(0)

    def _is_sequence_part(self, places: Sequence[_Figures], *, first_rank_counts: bool = False) -> Tensor:
        """Whether an output [B, T / tp, D] is a part of each sequence [n]; with ``first_rank_counts`` not on the first rank."""
        dims = self._target.dims
        splits = dims.plan.tensor_parallel.sequence_parallel and dims.sizes["tp"] > 1
        is_part = [splits and len(part.shape) == 3 and part.shape[1] < self._length for part in places]
        if first_rank_counts and dims.sizes["tp"] > 1 and dims.rank_along("tp") == 0:
            is_part = [False] * len(places)
        return torch.tensor(is_part, device=places[0].sums.device)

    def _alive_channels(self, places: Sequence[_Figures]) -> list[Tensor]:
        """Which channels of each output are not zero in the whole global batch, as far as this tensor-parallel rank has them."""
        dims = self._target.dims
        if self._target.ranks_diverge:
            return [part.alive for part in places]
        widths = torch.tensor([float(len(part.alive)) for part in places], device=places[0].sums.device)
        for axis in _DATA_AXES:  # a rank whose samples did not use a module has none
            widths = dims.max(widths, axis)
        sizes = [int(width) for width in widths.tolist()]
        padded = [
            part.alive if len(part.alive) == size else part.alive.new_zeros(size)
            for part, size in zip(places, sizes, strict=True)
        ]
        flat = torch.cat(padded)
        for axis in _DATA_AXES:
            flat = dims.max(flat, axis)
        rows = list(flat.split(sizes))
        is_part: list[bool] = self._is_sequence_part(places).tolist()
        if any(is_part):
            joint = dims.max(torch.cat([row for row, part in zip(rows, is_part, strict=True) if part]), "tp")
            joined = iter(joint.split([size for size, part in zip(sizes, is_part, strict=True) if part]))
            rows = [next(joined) if part else row for row, part in zip(rows, is_part, strict=True)]
        return rows


def first_floating(output: Any) -> Tensor | None:
    """The first floating tensor of what a module returned: itself, or in a tuple, list or mapping; None if there is none."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        output = list(cast("Mapping[Any, Any]", output).values())
    if isinstance(output, tuple | list):
        for item in cast("Sequence[Any]", output):
            if (tensor := first_floating(item)) is not None:
                return tensor
    return None


def _as_rows(
    parts: Mapping[str, _Figures], sums: Tensor, extremes: Tensor, divisor: Tensor
) -> dict[str, dict[str, Any]]:
    """The figures as numbers, in units of ``divisor``."""
    norms = (sums[:, 0].sqrt() / divisor).tolist()
    limits = (extremes / divisor).tolist()
    found: dict[str, dict[str, Any]] = {}
    for (name, part), norm, (high, low), (_, numel, zeros, bad) in zip(
        parts.items(), norms, limits, sums.tolist(), strict=True
    ):
        found[name] = {
            "shape": [],
            "dtype": part.dtype,
            "numel": int(numel),
            "min": -low if numel else 0.0,
            "max": high if numel else 0.0,
            "norm": norm,
            "zero_frac": zeros / numel if numel else 0.0,
            "nonfinite": int(bad),
        }
    return found


def _chunks(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = iter(entries.items())
    chunks: list[dict[str, Any]] = []
    while chunk := dict(islice(items, _ENTRIES_PER_EVENT)):
        chunks.append(chunk)
    return chunks or [{}]
