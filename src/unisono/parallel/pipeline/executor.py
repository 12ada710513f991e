"""Runs a step's micro-batches through the stages of a model, in the order of the plan's schedule.

What one stage computes goes to the next by a link: a group of two ranks that carries messages one way, in order. NCCL has no
tags, and would mix up messages (and wait in a ring) if two directions or two pairs of stages shared a group. Sends run beside
the computation; the next receive is posted before the pass that comes before it. A header with shape and dtype goes ahead of the
first hidden state of its kind on a link; gradients have the shape of what they are of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.errors import PlanError
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.stages import PipelineStages
from unisono.parallel.pipeline.weight_gradients import PendingGradients, WeightGradients
from unisono.plan.pipeline_schedule import Action, forward_order, schedule_order, stage_index

Micro = Mapping[str, Tensor]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_DIMS = 8
Spec = tuple[torch.Size, torch.dtype]


class PipelineExecutor:
    """One rank's part. All ranks make it together, with equal models cut alike, before anything else wraps the blocks' layers."""

    def __init__(self, stages: PipelineStages, grid: ParallelDims, device: torch.device) -> None:
        self._stages, self._plan, self._world, self._device = stages, grid.plan, grid.world, device
        self._rank = grid.rank_along("pp")
        self._weights = WeightGradients(stages.blocks) if grid.plan.pipeline.schedule == "zbv" else None
        plan = grid.plan
        places = {
            stage_index(plan.pipeline.schedule, plan.mesh.pp, rank, chunk): rank
            for rank in range(plan.mesh.pp)
            for chunk in range(plan.stages_per_rank)
        }
        self._place = [places[stage] for stage in range(stages.num_stages)]
        self._connect(grid)
        self._specs: dict[Any, Spec] = {}
        self._posted: dict[Action, tuple[Any, Tensor]] = {}
        self._sending: list[tuple[Any, Tensor]] = []
        self._here: dict[Action, Tensor] = {}
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return self._place[-1] == self._rank

    def _connect(self, grid: ParallelDims) -> None:
        place, last = self._place, self._stages.num_stages - 1
        ways = [
            (a, b) for low in range(last) for a, b in ((low, low + 1), (low + 1, low)) if place[low] != place[low + 1]
        ]
        lines = torch.arange(self._plan.mesh.world_size).view(
            self._plan.mesh.pp, -1
        )  # every rank knows every pipeline: groups are made by all
        wanted = {_link(*way): lines[[place[way[0]], place[way[1]]]].T.tolist() for way in ways}
        for stages in sorted(set(self._stages.partition.shared_parameters.values())):
            ranks = sorted({place[stage] for stage in stages})
            if len(ranks) > 1:
                wanted[_sharers(stages)] = lines[ranks].T.tolist()
        self._groups = self._world.groups(wanted)
        self._peers = dict(enumerate(grid.ranks_along("pp")))
        # the first message makes the connection, which may hold up both ends (NCCL): here all do it in one order
        for way in ways:
            if _link(*way) in self._groups:
                token = torch.zeros(1, device=self._device)
                with self._world.guard(f"connecting stages {way[0]} and {way[1]}"):
                    if way[0] in self._stages.stage_ids:
                        self._isend(token, *way).wait()
                    else:
                        self._irecv(token, *way).wait()

    # --- steps -------------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        micros: Sequence[Micro],
        forward: Callable[[Micro], Any],
        loss: Callable[[Any, Micro], Tensor],
        before_last_backward: Callable[[Sequence[nn.Module] | None], None],
        around: Callable[[str, Micro], AbstractContextManager[Any]],
    ) -> None:
        """One step: gradients of ``loss`` pile up in the parameters that are here.

        ``forward(micro)`` calls the model. ``loss(outputs, micro)`` runs on the last stage only; what it returns [] is
        propagated back. ``before_last_backward`` is called before the last backward pass of each stage here, with its blocks, and
        before the last of all, with None; never where weight gradients come later (zbv). Passes run inside
        ``around("forward", micro)`` or ``around("backward", micro)``.
        """
        plan = self._plan
        actions = schedule_order(plan.pipeline.schedule, plan.mesh.pp, plan.stages_per_rank, len(micros))[self._rank]
        owed: dict[tuple[int, int], PendingGradients] = {}
        last = {action.stage: number for number, action in enumerate(actions) if action.kind in "BI"}
        try:
            for number, action in enumerate(actions):
                self._post_next(actions[number:], micros)
                # a weight gradient may come later still
                if number == last[action.stage] and self._weights is None:
                    before_last_backward(None if number == max(last.values()) else self._stages.blocks_of(action.stage))
                micro = micros[action.micro]
                if action.kind == "F":
                    self._forward(action, micros, forward, loss, around("forward", micro))
                elif action.kind == "B":
                    self._backward(action, around("backward", micro))
                elif action.kind == "W":
                    with around("backward", micro):
                        WeightGradients.accumulate(owed.pop(action[1:]))
                else:
                    assert self._weights is not None
                    with self._weights.collect() as owed[action[1:]]:
                        self._backward(action, around("backward", micro))
            self._finish_sending()
        finally:
            self._forget()

    def evaluate(self, micros: Sequence[Micro], forward: Callable[[Micro], Any]) -> list[Any]:
        """What the model returns for each of ``micros`` on the rank with the last stage, None for each elsewhere.

        Forward passes only, of any number of micro-batches."""
        plan = self._plan
        actions = forward_order(plan.pipeline.schedule, plan.mesh.pp, self._rank, plan.stages_per_rank, len(micros))
        outputs: list[Any] = [None] * len(micros)
        try:
            with torch.no_grad():
                for number, action in enumerate(actions):
                    self._post_next(actions[number:], micros)
                    returned = self._pass(action, self._hidden(action, micros), micros, forward)
                    if action.stage == self._stages.num_stages - 1:
                        outputs[action.micro] = returned
                    else:
                        self._send_hidden(action, returned, micros)
            self._finish_sending()
        finally:
            self._forget()
        return outputs

    @property
    def shared_parameter_groups(self) -> list[tuple[ProcessGroup, list[str]]]:
        """Groups of ranks whose stages use the same parameters, and these, for ``ReplicatedGradients``."""
        named: dict[str, list[str]] = {}
        for name, stages in sorted(self._stages.partition.shared_parameters.items()):
            named.setdefault(_sharers(stages), []).append(name)
        return [(self._groups[sharers], names) for sharers, names in named.items() if sharers in self._groups]

    # --- passes ------------------------------------------------------------------------------------------------------

    def _hidden(self, action: Action, micros: Sequence[Micro]) -> Tensor | None:
        """What the stage goes on from; None for the first."""
        if action.stage == 0:
            return None
        return self._receive(action, micros).requires_grad_(torch.is_grad_enabled())

    def _pass(
        self, action: Action, received: Tensor | None, micros: Sequence[Micro], forward: Callable[[Micro], Any]
    ) -> Any:
        self._stages.activate(action.stage, received)
        return forward(micros[action.micro])

    def _forward(
        self,
        action: Action,
        micros: Sequence[Micro],
        forward: Callable[[Micro], Any],
        loss: Callable[[Any, Micro], Tensor],
        around: AbstractContextManager[Any],
    ) -> None:
        received = self._hidden(action, micros)
        with around:
            output = self._pass(action, received, micros, forward)
            if action.stage == self._stages.num_stages - 1:
                output = loss(output, micros[action.micro])
        if action.stage < self._stages.num_stages - 1:
            self._send_hidden(action, output, micros)
        self._kept[action[1:]] = received, output

    def _backward(self, action: Action, around: AbstractContextManager[Any]) -> None:
        gradient = None if action.stage == self._stages.num_stages - 1 else self._receive(action, ())
        received, output = self._kept.pop(action[1:])
        if output.requires_grad:  # a first stage may have nothing to train
            with around, self._world.guard_collectives("backward pass"):
                torch.autograd.backward(output, gradient)
        if received is not None:
            self._send(action, received.grad if received.grad is not None else torch.zeros_like(received))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _way(self, action: Action) -> tuple[int, int]:
        """From which stage to which ``action``'s result goes."""
        return action.stage, action.stage + (1 if action.kind == "F" else -1)

    def _source(self, action: Action) -> Action | None:
        """Whose result ``action`` waits for; None at the ends of the pipeline."""
        stage = action.stage + (-1 if action.kind == "F" else 1)
        return action._replace(stage=stage) if action.kind != "W" and 0 <= stage < self._stages.num_stages else None

    def _spec(self, action: Action, micros: Sequence[Micro]) -> Spec | None:
        """Shape and dtype of what ``action`` receives, where they are known."""
        if action.kind == "F":
            return self._specs.get((action.stage, _shapes(micros[action.micro])))
        activations = self._kept.get(action[1:])
        return None if activations is None else (activations[1].shape, activations[1].dtype)

    def _post_next(self, actions: Sequence[Action], micros: Sequence[Micro]) -> None:
        """Post the receive of the first action, and of the first one behind it that has any, where its spec is known: a header
        has to be waited for, and what it waits for may be this rank."""
        waiting = [action for action in actions[1:] if self._remote(action)][:1]
        for action in [*(action for action in actions[:1] if self._remote(action)), *waiting]:
            spec = self._spec(action, micros)
            if spec is None:
                return  # later messages of the same link must not overtake
            if action not in self._posted:
                buffer = torch.empty(spec[0], dtype=spec[1], device=self._device)
                with self._world.guard_collectives("receive from another stage"):
                    self._posted[action] = self._irecv(buffer, *self._incoming(action)), buffer

    def _incoming(self, action: Action) -> tuple[int, int]:
        source = self._source(action)
        assert source is not None
        return self._way(source)

    def _remote(self, action: Action) -> bool:
        source = self._source(action)
        return source is not None and self._place[source.stage] != self._rank

    def _receive(self, action: Action, micros: Sequence[Micro]) -> Tensor:
        source = self._source(action)
        assert source is not None
        if not self._remote(action):
            return self._here.pop(source)
        with self._world.guard_collectives(f"receive from stage {source.stage}"):
            if action not in self._posted:  # its spec was not known
                header = torch.zeros(_MAX_DIMS + 2, dtype=torch.int64)
                self._irecv(header, *self._way(source)).wait()
                code, dims, *sizes = header.tolist()
                self._specs[action.stage, _shapes(micros[action.micro])] = torch.Size(sizes[:dims]), _DTYPES[code]
                self._post_next([action], micros)
            work, buffer = self._posted.pop(action)
            work.wait()
        return buffer

    def _send_hidden(self, action: Action, hidden: Tensor, micros: Sequence[Micro]) -> None:
        key, spec = (action.stage + 1, _shapes(micros[action.micro])), (hidden.shape, hidden.dtype)
        if key not in self._specs:
            _check(hidden)
            self._specs[key] = spec
            if self._place[action.stage + 1] != self._rank:
                header = [_DTYPES.index(hidden.dtype), hidden.dim(), *hidden.shape]
                header += [0] * (_MAX_DIMS + 2 - len(header))
                self._keep_sending(torch.tensor(header), *self._way(action))
        elif self._specs[key] != spec:
            raise PlanError(
                given=f"a hidden state of {list(spec[0])} {spec[1]} behind stage {action.stage}, before "
                f"{list(self._specs[key][0])} {self._specs[key][1]} from inputs of the same shapes",
                rule="the shape of what stages pass on follows from the shapes of the inputs",
                consequence="the next stage would not know how much to receive",
                nearest="plan.pp=1, or inputs whose shapes say it",
            )
        self._send(action, hidden)

    def _send(self, action: Action, result: Tensor) -> None:
        way = self._way(action)
        if self._place[way[1]] == self._rank:
            self._here[action] = result.detach()
        else:
            self._keep_sending(result.detach().contiguous(), *way)

    def _keep_sending(self, tensor: Tensor, sender: int, receiver: int) -> None:
        self._sending = [(work, sent) for work, sent in self._sending if not work.is_completed()]
        with self._world.guard_collectives(f"send to stage {receiver}"):
            self._sending.append((self._isend(tensor, sender, receiver), tensor))

    def _finish_sending(self) -> None:
        with self._world.guard_collectives("send to another stage"):
            for work, _ in self._sending:
                work.wait()

    def _forget(self) -> None:
        for store in (self._sending, self._posted, self._here, self._kept):
            store.clear()

    def _isend(self, tensor: Tensor, sender: int, receiver: int) -> Any:
        return dist.isend(tensor, self._peers[self._place[receiver]], group=self._groups[_link(sender, receiver)])

    def _irecv(self, tensor: Tensor, sender: int, receiver: int) -> Any:
        return dist.irecv(tensor, self._peers[self._place[sender]], group=self._groups[_link(sender, receiver)])


def _link(sender: int, receiver: int) -> str:
    return f"stage {sender} to {receiver}"


def _sharers(stages: tuple[int, ...]) -> str:
    return f"stages {', '.join(map(str, stages))}"


def _shapes(micro: Micro) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in micro.values())


def _check(hidden: Tensor) -> None:
    if hidden.dtype in _DTYPES and hidden.dim() <= _MAX_DIMS:
        return
    raise PlanError(
        given=f"a hidden state of {list(hidden.shape)} {hidden.dtype}",
        rule=f"stages pass on {', '.join(map(str, _DTYPES))} of at most {_MAX_DIMS} dims",
        consequence="the next stage could not receive it",
        nearest="plan.pp=1, or a hidden state like that",
    )
