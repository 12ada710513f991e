"""Records a replayed step: a digest and norms of every tensor, per operator, module call, gradient and update, in order.

Recording is for comparing runs (``compare.first_difference``); a step takes many times as long as another. It changes no bit:
the passes, the synchronisation and the update are those of the run. ``TorchDispatchMode``, which is outside of torch's documented
interface (tested with torch 2.13.0), sees every operator. Collectives are left out: their results are recorded as gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.compare.divergence import finite_or_none
from unisono.compare.step_record import BACKWARD as BACKWARD_PHASE
from unisono.compare.step_record import (
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    RANDOM,
    START,
    SYNC,
    Entry,
    Replay,
    ReplayRequest,
    Shard,
    StepRecord,
    values_path,
    write_record,
    write_replay,
)
from unisono.data.loading.loader import StepBatch
from unisono.parallel.mesh import AXES, ParallelDims
from unisono.parallel.sharding import TensorShard
from unisono.storage.files import open_new
from unisono.train.objectives import Batch
from unisono.train.operator_places import (
    COLLECTIVE_NAMESPACES,
    ModuleCall,
    OperatorPlaces,
    is_view,
    leaves,
    local,
    micro_batch_number,
    num_rows,
    written_arguments,
)
from unisono.train.state import generator_states
from unisono.train.step import Step, TrainStep
from unisono.train.taps import Taps
from unisono.train.tensor_digest import tensor_digest

_UNRECORDED_NAMESPACES: Final = COLLECTIVE_NAMESPACES | {"prim", "prims"}
# they compute nothing, and whether they are there depends on strides
_COPIES: Final = frozenset({"aten.clone.default", "aten._unsafe_view.default", "aten.lift_fresh_copy.default"})
_VALUES_BYTES: Final = 1 << 30  # of a step and rank that are kept
_TENSOR_BYTES: Final = 64 << 20  # of the largest tensor that is kept
_MAX_TEXT: Final = 300  # characters of the arguments of an operator
_WIDE: Final = frozenset({torch.float32, torch.float64, torch.float16})  # numpy has these floating dtypes


@dataclass(kw_only=True, slots=True)
class StepRecorder:
    """Makes the steps of a replay, records the requested ones, and ends the process after the last.

    Attributes:
        request: What the replay does.
        dims: The mesh of the ranks.
        modules: Description of each module of the unsharded model.
        code: The record of the run's code, by setting.
        settings: Settings that the update reads besides the optimizer's groups, such as ``clip_norm``.
    """

    request: ReplayRequest
    dims: ParallelDims
    modules: Mapping[str, str]
    code: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, str]
    _replay: Replay = field(default_factory=Replay)

    def run(self, train_step: TrainStep, batch: StepBatch) -> Step:
        """Make the step. Raises SystemExit after the last one that was asked for."""
        number, rank = batch.step + 1, self.dims.world.rank
        folder = Path(self.request.record_dir)
        if number in self.request.record_steps:
            with open_new(values_path(folder, number, rank)) as values:
                recording = _StepObserver(train_step, self.dims, values)
                recording.begin(batch)
                step = recording.observed_step().run(batch)
            write_record(folder, self._record(train_step, recording, batch, step))
        else:
            step = train_step.run(batch)
        self._replay.losses[number], self._replay.grad_norms[number] = step.loss, step.grad_norm
        self._replay.states[number] = _state_digest(train_step)
        if number < self.request.last_step:
            return step
        write_replay(folder, rank, self._replay)
        self.dims.world.barrier()
        raise SystemExit(0)

    def _record(self, train_step: TrainStep, recording: _StepObserver, batch: StepBatch, step: Step) -> StepRecord:
        plan, dims = self.dims.plan, self.dims
        layout: dict[str, int | str | bool] = {axis: int(getattr(plan.mesh, axis)) for axis in (*AXES, "ep")}
        layout |= {"micro_batch": plan.batch.micro_batch, "accumulation": plan.batch.accumulation}
        layout |= {"precision": plan.precision.compute, "tf32": plan.backend.tf32, "world": dims.world.world_size}
        layout |= {f"{axis}_rank": dims.rank_along(axis) for axis in AXES} | {"data_rank": dims.data_rank}
        return StepRecord(
            step=step.index,
            rank=dims.world.rank,
            loss=step.loss,
            grad_norm=step.grad_norm,
            sample_ids=batch.sample_ids.tolist(),
            rows=[num_rows(part) for part in batch.micro_batches],
            layout=layout,
            modules=dict(self.modules),
            code={setting: dict(parts) for setting, parts in self.code.items()},
            hyperparameters=recording.hyperparameters | dict(self.settings),
            entries=recording.entries(),
        )


def describe_modules(model: nn.Module) -> dict[str, str]:
    """The class of each module with the arguments that its ``repr`` shows, by name."""
    return {path: f"{type(module).__name__}({module.extra_repr()})" for path, module in model.named_modules()}


class _StepObserver(TorchDispatchMode):
    """Observes one step, and collects its entries."""

    def __init__(self, train_step: TrainStep, dims: ParallelDims, values: IO[bytes]) -> None:
        super().__init__()
        self.hyperparameters: dict[str, str] = {}
        self._step, self._dims, self._values = train_step, dims, values
        self._state = train_step.state
        self._places = OperatorPlaces(lambda call, args, kwargs: None, self._leaving)
        self._phase, self._written = FORWARD, 0
        self._is_adding = False  # operators of a summary are not recorded
        self._entries: list[dict[str, Any]] = []
        self._digests: list[Tensor] = []
        self._norms: list[Tensor] = []  # [2] of each entry: norm, largest magnitude
        self._seen: list[Batch] = []
        self._names: dict[int, str] = {}  # of the tensors of the update, by address
        self._stack = ExitStack()

    def observed_step(self) -> TrainStep:
        """The step with its inputs, objective, passes and update observed."""
        step = self._step
        inner = step.forward_backward

        def inputs(micro_batch: Batch) -> dict[str, Tensor]:
            self._begin_micro_batch(micro_batch)
            self._phase = FORWARD
            return inner.inputs(micro_batch)

        def objective(outputs: Any, micro_batch: Batch) -> tuple[Any, Tensor]:
            self._begin_micro_batch(micro_batch)
            self._phase = LOSS
            losses, weight = step.objective(outputs, micro_batch)
            named = losses if isinstance(losses, Mapping) else {"loss": losses}
            for name, tensor in {**cast("Mapping[str, Tensor]", named), "weight": weight}.items():
                self._add("loss", tensor, LOSS, tensor=name, micro_batch=self._places.micro_batch)
            return losses, weight

        return replace(
            step,
            forward_backward=replace(inner, inputs=inputs),
            objective=objective,
            taps=cast(Taps, _RecordingTaps(self)),
        )

    # --- before the passes ----------------------------------------------------------------------------------------------

    def begin(self, batch: StepBatch) -> None:
        """Record the batch, the state and the random generators before the step."""
        state = self._state
        for number, micro_batch in enumerate(batch.micro_batches):
            for name, tensor in micro_batch.items():
                if isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                    self._add("input", tensor, DATA, tensor=name, micro_batch=number)
        shards = state.shards()
        for path, tensor in self._all_state().items():
            self._add("state", tensor, START, layer=_layer_of(path), tensor=path, shard=shards.get(path))
        for path, tensor in generator_states(self._dims.rng_rank).items():
            self._add("state", tensor, RANDOM, tensor=path.rpartition("/")[2])

    def _all_state(self) -> dict[str, Tensor]:
        """The state, with buffers that no checkpoint has; weights first."""
        state = self._state
        tensors = {path: tensor for path, tensor in state.global_state().items() if tensor.numel()}
        for name, buffer in state.model.named_buffers():
            tensors.setdefault(f"model/{name}", buffer)
        if state.sync_state is not None:
            tensors |= {f"sync/{name}": tensor for name, tensor in state.sync_state.rank_state().items()}
        return dict(sorted(tensors.items(), key=lambda item: not item[0].startswith("model/")))

    # --- the passes -----------------------------------------------------------------------------------------------------

    def watch_passes(self) -> None:
        """Until ``stop``, record operators and module calls of the passes."""
        self._stack.enter_context(self._places.following(self._step.forward_backward.model))
        if self._dims.plan.backend.compile != "off":
            self._stack.enter_context(cast(Any, torch.compiler.set_stance("force_eager")))
        self._stack.enter_context(self)

    def stop(self) -> None:
        """Record no more operators."""
        self._stack.close()

    def _begin_micro_batch(self, micro_batch: Batch) -> None:
        self._places.micro_batch = micro_batch_number(micro_batch, self._seen)

    def _leaving(self, call: ModuleCall, output: Any) -> None:
        for place, tensor in enumerate(value for value in leaves(output) if isinstance(value, Tensor)):
            self._add("output", tensor, FORWARD, call=call, place=place, micro_batch=call.micro_batch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func)
        if (
            self._is_adding
            or func.namespace in _UNRECORDED_NAMESPACES
            or name in _COPIES
            or "empty" in name
            or is_view(func)
        ):
            return result
        results = [value for value in leaves(result) if isinstance(value, Tensor)]
        if not results:
            results = [
                t for value in written_arguments(func, args, kwargs) for t in leaves(value) if isinstance(t, Tensor)
            ]
        if self._phase == OPTIMIZER:
            self._add_update(name, results, args, kwargs)
            return result
        call = self._places.current()
        phase = BACKWARD_PHASE if self._places.is_backward else FORWARD if call is not None else self._phase
        arguments = _arguments_text(args, kwargs)
        micro_batch = self._places.micro_batch if call is None else call.micro_batch
        for place, tensor in enumerate(results):
            if place and tensor.dtype == torch.uint8:
                continue  # a workspace of a kernel, which need not be filled
            self._add(
                "operator",
                tensor,
                phase,
                call=call,
                operator=name,
                place=place,
                arguments=arguments,
                micro_batch=micro_batch,
            )
        return result

    # --- the update -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_update(self, gradients: Sequence[Tensor], divisor: Tensor) -> None:
        """Record the reduced ``gradients``, in order of the trained parameters, and watch the operators of the update."""
        sharded = self._state.sharded
        names = [name for name, parameter in sharded.parameters.items() if parameter.requires_grad]
        for name, gradient in zip(names, gradients, strict=True):
            shard = sharded.shard_of(name, gradient)
            self._add("gradient", gradient, SYNC, layer=_layer_of(f"model/{name}"), tensor=name, shard=shard)
        self._add("gradient", divisor, SYNC, tensor="divisor of the gradients")
        local_state = self._state.local_state()
        self._names = {local(tensor).data_ptr(): path for path, tensor in local_state.items() if tensor.numel()}
        self._names |= {
            local(gradient).data_ptr(): f"gradient/{name}" for name, gradient in zip(names, gradients, strict=True)
        }
        self._phase = OPTIMIZER
        self._stack.enter_context(self)

    @torch.no_grad()
    def after_update(self) -> None:
        """Record the updated state, and what the optimizer was set to."""
        self.stop()
        shards = self._state.local_shards()
        for path, tensor in self._state.local_state().items():
            self._add("updated", tensor, OPTIMIZER, layer=_layer_of(path), tensor=path, shard=shards.get(path))
        for number, group in enumerate(self._state.optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    text = f"{float(value)!r}" if isinstance(value, Tensor) and value.numel() == 1 else repr(value)
                    self.hyperparameters[f"{name} of group {number}"] = text

    def _add_update(self, name: str, results: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        given = [value for value in leaves((args, kwargs)) if isinstance(value, Tensor)]
        of_inputs = next((found for tensor in given if (found := self._name_of(tensor))), "")
        arguments = _arguments_text(args, kwargs)
        for place, tensor in enumerate(results):
            path = self._name_of(tensor) or of_inputs
            self._add(
                "operator",
                tensor,
                OPTIMIZER,
                layer=_layer_of(path),
                operator=name,
                tensor=path,
                place=place,
                arguments=arguments,
            )

    def _name_of(self, tensor: Tensor) -> str:
        part = local(tensor)
        return self._names.get(part.data_ptr(), "") if part.numel() and not part.is_meta else ""

    # --- entries --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _add(
        self,
        kind: str,
        value: Tensor,
        phase: str,
        *,
        call: ModuleCall | None = None,
        layer: str = "",
        shard: TensorShard | None = None,
        **fields: Any,
    ) -> None:
        place = {"layer": layer if call is None else call.path, "call": 0 if call is None else call.number}
        self._is_adding = True
        try:
            self._summarise(local(value).detach(), shard, fields | {"kind": kind, "phase": phase} | place)
        finally:
            self._is_adding = False

    def _summarise(self, part: Tensor, shard: TensorShard | None, fields: Mapping[str, Any]) -> None:
        if part.is_meta or part.layout != torch.strided:
            return
        part = part.resolve_conj().resolve_neg()
        self._digests.append(tensor_digest(part))
        self._norms.append(_norms(part))
        begin, stored = self._keep(part)
        self._entries.append(
            {
                **{"micro_batch": 0, "operator": "", "tensor": "", "place": 0, "arguments": ""},
                **fields,
                "shape": tuple(part.shape),
                "dtype": str(part.dtype).removeprefix("torch."),
                "begin": begin,
                "stored": stored,
                "shard": None if shard is None else _shard(shard, part),
            }
        )

    def _keep(self, part: Tensor) -> tuple[int, str]:
        """Write the values, up to the limits; returns their offset in the file, -1 if not written, and their dtype."""
        if part.is_complex():
            return -1, ""
        if part.is_floating_point() and part.dtype not in _WIDE:
            part = part.float()  # exact
        size = part.numel() * part.element_size()
        if size > _TENSOR_BYTES or self._written + size > _VALUES_BYTES:
            return -1, ""
        # a copy: FSDP2 resizes storages, and those that numpy has seen cannot be
        begin, array = self._written, part.clone().cpu().contiguous().numpy()
        self._values.write(array.tobytes())
        self._written += size
        return begin, array.dtype.str

    def entries(self) -> list[Entry]:
        """All entries, in order. Waits for the device."""
        digests = torch.stack(self._digests).tolist() if self._digests else []
        norms = torch.stack(self._norms).tolist() if self._norms else []
        return [
            Entry(**fields, digest=digest, norm=finite_or_none(norm), max_abs=finite_or_none(max_abs))
            for fields, digest, (norm, max_abs) in zip(self._entries, digests, norms, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _RecordingTaps:
    """Takes the place of a step's taps, which the step enters around its passes and calls before and after its update."""

    recording: _StepObserver

    def reading(self, _step: int) -> _RecordingTaps:
        """See ``Taps``."""
        return self

    def __enter__(self) -> _RecordingTaps:
        self.recording.watch_passes()
        return self

    def __exit__(self, *_: object) -> None:
        self.recording.stop()

    def before_update(self, gradients: Sequence[Tensor], divisor: Tensor) -> None:
        """See ``TapReading``."""
        self.recording.before_update(gradients, divisor)

    def emit(self, _step: int, _good: Tensor) -> None:
        """See ``TapReading``."""
        self.recording.after_update()


def _norms(part: Tensor) -> Tensor:
    """Norm and largest magnitude [2]."""
    exact = torch.float32 if part.device.type == "mps" else torch.float64
    if not part.numel():
        return torch.zeros(2, dtype=exact, device=part.device)
    wide = part.abs().to(exact) if part.is_complex() else part.to(exact)
    return torch.stack([torch.linalg.vector_norm(wide), wide.abs().amax()])


def _state_digest(train_step: TrainStep) -> int:
    """A digest of all parameters, buffers and optimizer state of this rank."""
    total = 0
    for number, tensor in enumerate(train_step.state.local_state().values()):
        total = (total * 31 + number + int(tensor_digest(tensor))) % (1 << 63)
    return total


def _shard(shard: TensorShard, part: Tensor) -> Shard:
    blocks: list[tuple[tuple[tuple[int, int], ...], tuple[int, ...]]] = []
    for index, offset in shard.blocks():
        bounds = [(0, size) for size in part.shape]
        for dim, chosen in enumerate(index):
            if chosen != slice(None):
                bounds[dim] = (chosen.start, chosen.stop)
        blocks.append((tuple(bounds), tuple(offset)))
    return Shard(global_shape=tuple(shard.global_shape), blocks=tuple(blocks))


def _layer_of(path: str) -> str:
    """The module whose parameter, buffer, gradient, moment or average has this path; empty for other tensors."""
    kind, _, name = path.partition("/")
    if kind == "optim":
        name = name.partition("/")[2]
    return name.rpartition(".")[0] if kind in ("model", "optim", "ema", "gradient") else ""


def _arguments_text(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments that are no tensors."""
    texts = [_argument_text(value) for value in args]
    texts += [f"{name}={text}" for name, value in kwargs.items() if (text := _argument_text(value))]
    return ", ".join(filter(None, texts))[:_MAX_TEXT]


def _argument_text(value: Any) -> str:
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in cast("list[Any]", value)):
        return ""
    return "" if isinstance(value, Tensor | torch.Generator | torch.device) or value is None else repr(value)
