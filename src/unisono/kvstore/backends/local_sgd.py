"""The kind ``dist_local``: every worker trains on its own, and the copies are averaged periodically.

* LocalSGD (Stich 2019, arXiv 1805.09767): every H steps the parameters become the mean over workers. ``outer_lr=1,
  outer_momentum=0``.
* DiLoCo (Douillard et al. 2023, arXiv 2311.08105): each worker's parameter change over H steps is a gradient; its mean
  over workers makes a step of an outer SGD with Nesterov momentum, 0.9 at a rate of 0.7.
* Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): the parameters are split into fragments with boundaries at
  different steps; a sum is applied ``outer_delay_steps`` later and mixed with the worker's current parameters.

With outer parameters w (equal on all workers), local parameters x_i and D = mean_i(w - x_i) at the boundary:

    m = mu m + D;   w = w - lr (D + mu m);   x_i = mix x_i + (1 - mix) w

``mix`` is 0 without a delay. Between boundaries the parameters differ over workers: a checkpoint needs every worker's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.dist import World
from unisono.errors import CheckpointError, ConfigError, Problem
from unisono.kvstore.compression import Codec, PowerSGD, compressed_sum, find_codec
from unisono.kvstore.compression.registry import codec_is_fixed, no_traffic_to_compress
from unisono.kvstore.keys import Future, PushValue, SparseRows
from unisono.kvstore.value_store import ValueStore
from unisono.optim.options import OptimOptions
from unisono.plan.validate import round_problems

_RESIDUAL = "compression/"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGDConfig:
    """When and how ``dist_local`` averages copies. The defaults of the outer optimizer are DiLoCo's.

    Attributes:
        local_steps: H, the steps between two averages of a parameter.
        outer_lr: Learning rate of the outer SGD, lr in the module's formulas; 1 without momentum makes the mean over workers.
        outer_momentum: Nesterov momentum of the outer SGD, mu in the formulas; from 0 to below 1.
        num_fragments: F, the number of runs of parameters that are averaged at steps of their own. Fragment f has its
            boundaries at steps (f + 1) H // F, and then every H.
        outer_delay_steps: Steps between a boundary and the application of its sum, below H.
        mix: Weight of the worker's current parameters when a sum is applied; None: 0.5 with a delay, else 0.

    Raises:
        ConfigError: With all problems of the values.

    Source:
        Stich 2019 (LocalSGD), Douillard et al. 2023 (DiLoCo), Douillard et al. 2025 (Streaming DiLoCo).
    """

    local_steps: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    num_fragments: int = 1
    outer_delay_steps: int = 0
    mix: float | None = None

    def __post_init__(self) -> None:
        inert_mix = self.outer_delay_steps == 0 and self.mix not in (None, 0)
        consequence, nearest = "copies would not be averaged as meant", "LocalSGDConfig(local_steps=16)"
        problems = [
            Problem(given=f"{name} = {getattr(self, name)}", rule=rule, consequence=consequence, nearest=nearest)
            for name, rule, is_wrong in (
                ("local_steps", "local_steps is at least 1", self.local_steps < 1),
                ("outer_lr", "outer_lr is above 0", not self.outer_lr > 0),
                ("outer_momentum", "outer_momentum is at least 0 and below 1", not 0 <= self.outer_momentum < 1),
                ("mix", "mix is at least 0 and below 1", self.mix is not None and not 0 <= self.mix < 1),
                ("mix", "mix has an effect only with outer_delay_steps above 0", inert_mix),
            )
            if is_wrong
        ]
        problems += round_problems(self.local_steps, self.num_fragments, self.outer_delay_steps)
        if problems:
            raise ConfigError(*problems)

    @property
    def local_weight(self) -> float:
        """``mix``, or its default."""
        return self.mix if self.mix is not None else 0.5 if self.outer_delay_steps else 0.0


class _FragmentPart:
    """Parameters of one fragment, dtype and device. The outer state is flat, in float32 or wider."""

    def __init__(self, name: str, members: Mapping[str, Tensor]) -> None:
        self.name, self._members = name, members
        first = next(iter(members.values()))
        self._dtype = torch.promote_types(first.dtype, torch.float32)
        self.outer = self.flat()
        self.momentum = torch.zeros_like(self.outer)
        self.delta = torch.zeros_like(self.outer)

    def flat(self) -> Tensor:
        """A copy of the local parameters, [elements]."""
        return torch.cat([tensor.detach().reshape(-1).to(self._dtype) for tensor in self._members.values()])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of ``flat`` [elements] in the shapes of the parameters, by name."""
        parts = flat.split([tensor.numel() for tensor in self._members.values()])
        return {
            name: part.view(tensor.shape) for (name, tensor), part in zip(self._members.items(), parts, strict=True)
        }

    def update(self, workers: int, config: LocalSGDConfig) -> None:
        """Make the outer step, with ``delta`` the sum over workers, and update the local parameters."""
        mean = self.delta.div_(workers)
        self.momentum.mul_(config.outer_momentum).add_(mean)
        self.outer.sub_(mean.add(self.momentum, alpha=config.outer_momentum), alpha=config.outer_lr)
        parts = self.outer.split([tensor.numel() for tensor in self._members.values()])
        for local, new in zip(self._members.values(), parts, strict=True):
            local, new = local.detach(), new.view(local.shape).to(local.dtype)
            if config.local_weight:
                local.mul_(config.local_weight).add_(new, alpha=1 - config.local_weight)
            else:
                local.copy_(new)


class LocalSGD:
    """Averages the parameters of all workers in place; call ``after_step`` after every local step.

    All workers make the same calls. Deterministic, and exact on resume from ``state_dict`` and the worker's own
    parameters.

    Args:
        parameters: The worker's parameters by name, equal on all workers at the start.
        world: The workers.
        config: When and how the parameters are averaged.
        codec: Compresses the change w - x_i; its residual is added at the fragment's next boundary. None: uncompressed.

    Attributes:
        sent_bytes: Bytes that this worker has given to the sums.
        received_bytes: Bytes that it has got from them.
        num_collectives: Number of collectives that this took.

    Raises:
        ConfigError: There are more fragments than parameters.

    Source:
        Stich 2019 (LocalSGD), Douillard et al. 2023 (DiLoCo), Douillard et al. 2025 (Streaming DiLoCo).
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], world: World, config: LocalSGDConfig, codec: Codec | None = None
    ) -> None:
        self._world, self._config = world, config
        self._fragments = [
            [
                _FragmentPart(f"{number}/{place}", {name: parameters[name] for name in names})
                for place, (_, names) in enumerate(_by_kind(run, parameters))
            ]
            for number, run in enumerate(split_into_fragments(parameters, config.num_fragments))
        ]
        self._pending: dict[int, list[Any]] = {}
        self.sent_bytes = self.received_bytes = self.num_collectives = 0
        # one per fragment, as several may be in flight
        self._exchanges = [
            compressed_sum(codec, {part.name: part.delta for part in parts}, world.group)
            for parts in self._fragments
            if codec is not None
        ]

    def due_fragments(self, step: int) -> list[int]:
        """The fragments whose boundary follows step ``step`` (counted from 0)."""
        every, count = self._config.local_steps, self._config.num_fragments
        return [f for f in range(count) if (step + 1 - (f + 1) * every // count) % every == 0]

    @torch.no_grad()
    def after_step(self, step: int) -> bool:
        """Start and finish the averages that are due after step ``step``; returns whether a parameter changed. Raises
        CommError if a worker is lost."""
        delay = self._config.outer_delay_steps
        for fragment in self.due_fragments(step):
            self._launch(fragment)
        finished = [fragment for fragment in self.due_fragments(step - delay) if fragment in self._pending]
        for fragment in finished:
            self._wait(fragment)
            del self._pending[fragment]
            for part in self._fragments[fragment]:
                part.update(self._world.world_size, self._config)
        return bool(finished)

    def outer_state(self) -> dict[str, Tensor]:
        """The outer parameters by name, and the outer momentum as ``momentum/<name>``: the live tensors, equal on all
        workers."""
        parts = [part for fragment in self._fragments for part in fragment]
        values = {name: tensor for part in parts for name, tensor in part.named(part.outer).items()}
        momenta = {name: tensor for part in parts for name, tensor in part.named(part.momentum).items()}
        return values | {f"momentum/{name}": tensor for name, tensor in momenta.items()}

    def in_flight_state(self) -> dict[str, Tensor]:
        """``state_dict`` without the outer state: pending sums and residuals."""
        return {
            name: tensor for name, tensor in self.state_dict().items() if not name.startswith(("outer/", "momentum/"))
        }

    def load_in_flight_state(self, underway: Mapping[str, Tensor]) -> None:
        """Load pending sums and residuals; the outer state stays. Raises CheckpointError for other fragments or another
        codec."""
        outer = {n: tensor for n, tensor in self.state_dict().items() if n.startswith(("outer/", "momentum/"))}
        self.load_state_dict(outer | dict(underway))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the outer parameters, the momentum and the pending sums, for which it waits; these are equal on all
        workers. With a codec also this worker's residuals."""
        state: dict[str, Tensor] = {}
        for fragment, parts in enumerate(self._fragments):
            self._wait(fragment)
            for part in parts:
                state[f"outer/{part.name}"] = part.outer.clone()
                state[f"momentum/{part.name}"] = part.momentum.clone()
                if fragment in self._pending:
                    state[f"delta/{part.name}"] = part.delta.clone()
        for fragment, coder in enumerate(self._exchanges):
            residuals = coder.state_dict()
            state |= {f"{_RESIDUAL}{fragment}/{name}": tensor.clone() for name, tensor in residuals.items()}
        return state

    def stats(self) -> dict[str, dict[str, float]]:
        """Compression statistics, see ``ErrorFeedback.stats``, by fragment and the index of the dtype in it."""
        return {name: stats for coder in self._exchanges for name, stats in coder.stats().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state_dict``. Raises CheckpointError for other fragments or another codec."""
        for fragment, coder in enumerate(self._exchanges):
            start = f"{_RESIDUAL}{fragment}/"
            coder.load_state_dict({n.removeprefix(start): tensor for n, tensor in state.items() if n.startswith(start)})
        if self._exchanges:
            state = {name: tensor for name, tensor in state.items() if not name.startswith(_RESIDUAL)}
        current = {
            f"{what}/{part.name}": tensor
            for parts in self._fragments
            for part in parts
            for what, tensor in (("outer", part.outer), ("momentum", part.momentum), ("delta", part.delta))
        }
        wrong = {name for name in current if name not in state and not name.startswith("delta/")} | {
            name for name, tensor in state.items() if name not in current or current[name].shape != tensor.shape
        }
        if wrong:
            raise CheckpointError(
                given=f"saved local steps that differ in {', '.join(map(repr, sorted(wrong)[:5]))}",
                rule="fragments and parameters are those of the run that was saved",
                consequence="nothing was loaded",
                nearest=f"the number of fragments it was saved with (here {self._config.num_fragments}) and the same model",
            )
        for name, tensor in state.items():
            current[name].copy_(tensor)
        self._pending = {
            number: []
            for number, parts in enumerate(self._fragments)
            if any(f"delta/{part.name}" in state for part in parts)
        }

    def _launch(self, fragment: int) -> None:
        works: list[Any] = []
        for part in self._fragments[fragment]:
            torch.sub(part.outer, part.flat(), out=part.delta)
            if self._world.group is not None and not self._exchanges:
                self._count(part.delta.nbytes, part.delta.nbytes)
                with self._world.explain_errors(f"average of fragment {fragment}"):
                    works.append(dist.all_reduce(part.delta, group=self._world.group, async_op=True))
        if self._exchanges:
            deltas = {part.name: part.delta for part in self._fragments[fragment]}
            with self._world.explain_errors(f"average of fragment {fragment}"):
                pending = self._exchanges[fragment].launch(deltas)
            self._count(pending.sent_bytes, pending.received_bytes, pending.num_collectives)
            works.append(pending)
        self._pending[fragment] = works

    def _count(self, sent_bytes: int, received_bytes: int, num_collectives: int = 1) -> None:
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        self.num_collectives += num_collectives

    def _wait(self, fragment: int) -> None:
        works = self._pending.get(fragment, [])
        with self._world.explain_errors(f"average of fragment {fragment}"):
            while works:
                works.pop(0).wait()
                if self._exchanges:
                    self._exchanges[fragment].commit(True)


def split_into_fragments(parameters: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Split the names, in order, into ``count`` non-empty runs of about the same number of elements.

    Raises ConfigError for more fragments than parameters.
    """
    names = list(parameters)
    if count > len(names):
        raise ConfigError(
            given=f"{count} fragments of {len(names)} parameters",
            rule="a fragment has at least one parameter",
            consequence="some boundaries would have nothing to average",
            nearest=f"num_fragments = {max(len(names), 1)}",
        )
    runs: list[list[str]] = []
    remaining = sum(value.numel() for value in parameters.values())
    for number in range(count, 0, -1):
        run, size, goal = [names.pop(0)], 0, remaining / number
        size = parameters[run[0]].numel()
        while len(names) >= number and (number == 1 or size + parameters[names[0]].numel() / 2 <= goal):
            run.append(names.pop(0))
            size += parameters[run[-1]].numel()
        runs.append(run)
        remaining -= size
    return runs


def _by_kind(names: Sequence[str], parameters: Mapping[str, Tensor]) -> list[tuple[str, list[str]]]:
    def kind(name: str) -> str:
        return f"{parameters[name].dtype} {parameters[name].device}"

    return [(what, list(run)) for what, run in groupby(sorted(names, key=kind), key=kind)]


class LocalSGDBackend:
    """A push updates this worker's copy; after every ``local_steps``-th push of all keys the copies are averaged.

    A step is one push of every key. ``set_optimizer`` sets the inner optimizer.
    """

    def __init__(self, world: World, config: LocalSGDConfig) -> None:
        self._values = ValueStore()
        self._world, self._config = world, config
        self._steps = 0
        self._pushed: set[str] = set()
        self._local: LocalSGD | None = None
        self._codec: Codec | None = None

    def init(self, values: Mapping[str, Tensor]) -> None:
        """Store these tensors. Raises ConfigError once steps have begun."""
        if self._local is not None:
            raise _refused(
                f"init of {', '.join(values)} after the first push", "all keys are there before the first push", "init"
            )
        self._values.init(values)

    def reduce_device(self, key: str, first: Tensor) -> torch.device:
        return first.device

    def push(self, items: Sequence[tuple[str, PushValue]], priority: int) -> Future[None]:
        """Update the local copy; average if this push ends a step at a boundary."""
        if not self._values.has_optimizer:
            raise _refused("a push without an optimizer", "'dist_local' averages what optimizers did", "set_optimizer")
        if self._local is None:
            self._local = LocalSGD(self._values.tensors, self._world, self._config, self._codec)
        for key, value in items:
            if key in self._pushed:
                missing = sorted(self._values.tensors.keys() - self._pushed)
                raise _refused(
                    f"a second push of {key!r} before {', '.join(map(repr, missing[:5]))}",
                    "a step pushes every key once",
                    "push",
                )
            self._values.apply(key, value)
            self._pushed.add(key)
            if len(self._pushed) == len(self._values.tensors):
                self._pushed.clear()
                self._local.after_step(self._steps)
                self._steps += 1
        return Future(lambda: None)

    def pull(self, items: Sequence[tuple[str, list[Tensor]]], priority: int) -> Future[None]:
        return self._values.copy_to(items)

    def pull_rows(self, key: str, ids: Tensor) -> Future[SparseRows]:
        return self._values.pull_rows(key, ids)

    def barrier(self) -> None:
        self._world.barrier()

    def set_optimizer(self, options: OptimOptions) -> None:
        self._values.set_optimizer(options)

    def set_learning_rate(self, lr: float) -> None:
        self._values.set_learning_rate(lr)

    def set_compression(self, codec: str | None) -> None:
        if self._local is not None:
            raise codec_is_fixed(codec)
        parsed = None if codec is None else find_codec(codec)
        if codec is not None and self._world.group is None:
            raise no_traffic_to_compress(codec, "with one worker")
        if isinstance(parsed, PowerSGD):
            raise no_traffic_to_compress(
                codec or "", "with 'dist_local', whose parameters are sent flat and have no factors"
            )
        self._codec = parsed

    def stats(self) -> dict[str, dict[str, float]]:
        return {} if self._local is None else self._local.stats()

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        """This worker's values and optimizer, the step, and the outer state. Raises ConfigError in the middle of a
        step."""
        self._between_steps()
        outer = (
            {}
            if self._local is None
            else {f"rounds/{name}": tensor for name, tensor in self._local.state_dict().items()}
        )
        return self._values.state_dict() | outer | {"steps": torch.tensor(self._steps, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of the same worker. Raises CheckpointError for any difference, ConfigError in the middle of a
        step."""
        self._between_steps()
        outer = {name.removeprefix("rounds/"): tensor for name, tensor in state.items() if name.startswith("rounds/")}
        inner = {name: tensor for name, tensor in state.items() if not name.startswith("rounds/")}
        steps = inner.pop("steps", None)
        if steps is None:
            raise CheckpointError(
                given=f"a saved state without 'steps', with {', '.join(map(repr, sorted(state)[:5])) or 'no entries'}",
                rule="the state of a 'dist_local' store says how many steps were made",
                consequence="nothing was loaded",
                nearest="the whole dict that state_dict() of a store of kind 'dist_local' returned",
            )
        local = LocalSGD(self._values.tensors, self._world, self._config, self._codec) if outer else None
        if local is not None:
            local.load_state_dict(outer)
        self._values.load_state_dict(inner)
        self._local, self._steps = local, int(steps)

    def close(self) -> None:
        self._values = ValueStore()
        self._local = None

    def _between_steps(self) -> None:
        if self._pushed:
            names = ", ".join(sorted(self._pushed)[:5])
            raise _refused(
                f"state in the middle of a step that has pushed {names}", "state is taken between two steps", "push"
            )


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(
        given=given,
        rule=rule,
        consequence="nothing was changed",
        nearest=f"{nearest} the missing keys or settings first",
    )
