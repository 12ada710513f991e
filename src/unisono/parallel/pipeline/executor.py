"""Runs a step's micro-batches through the stages of a model, in the order of the plan's schedule.

Neighbouring stages communicate over links: process groups of two ranks for messages in one direction. NCCL has no tags, so it
would mix up messages (and deadlock) if two directions or two pairs of stages shared a group. Sends overlap with computation; a
receive is posted before the pass that precedes its use. A header with shape and dtype is sent before the first hidden state of
each shape on a link; gradients have the shapes of their hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.errors import PlanError
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.pipeline.stages import PipelineStages
from unisono.parallel.pipeline.weight_gradients import PendingGradients, WeightGradients
from unisono.parallel.timed_collectives import count_in_backward, count_message
from unisono.plan.pipeline_schedule import Action, forward_order, schedule_order, stage_index

Micro = Mapping[str, Tensor]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_DIMS = 8
Spec = tuple[torch.Size, torch.dtype]
# by stage that receives and shapes of the micro-batch
HiddenStates = dict[tuple[int, tuple[torch.Size, ...]], Spec]


class UnknownHiddenState(Exception):
    """A stage of a simulated rank receives a hidden state of which nothing is known."""


class PipelineExecutor:
    """One rank's part of the pipeline. All ranks create it together, before other code wraps the layers of the blocks.

    ``hidden_states`` are shapes and dtypes that stages have received or passed on. ``around_pass`` gives a context for each pass
    of a step, in which also its messages are sent and received. ``is_sent`` tells of the work of a send whether its tensor may be
    freed; Gloo tells it to those alone who wait.
    """

    def __init__(self, stages: PipelineStages, dims: ParallelDims, device: torch.device) -> None:
        self._stages, self._plan, self._world, self._device = stages, dims.plan, dims.world, device
        self._rank = dims.rank_along("pp")
        self._weights = WeightGradients(stages.blocks) if dims.plan.pipeline.schedule == "zbv" else None
        plan = dims.plan
        rank_of = {
            stage_index(plan.pipeline.schedule, plan.mesh.pp, rank, chunk): rank
            for rank in range(plan.mesh.pp)
            for chunk in range(plan.stages_per_rank)
        }
        self._rank_of_stage = [rank_of[stage] for stage in range(stages.num_stages)]
        self._connect(dims)
        self.hidden_states: HiddenStates = {}
        self.around_pass: Callable[[Action], AbstractContextManager[Any]] = _plain
        self.is_sent: Callable[[Any], bool] = _is_completed
        self._posted: dict[Action, tuple[Any, Tensor]] = {}
        self._sending: list[tuple[Any, Tensor]] = []
        self._local: dict[Action, Tensor] = {}  # results that another stage of this rank receives
        self._activations: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (input, output)

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return self._rank_of_stage[-1] == self._rank

    def _connect(self, dims: ParallelDims) -> None:
        rank, last = self._rank_of_stage, self._stages.num_stages - 1
        links = [
            (a, b) for low in range(last) for a, b in ((low, low + 1), (low + 1, low)) if rank[low] != rank[low + 1]
        ]
        # all ranks create the groups of all pipelines
        pipelines = np.arange(self._plan.mesh.world_size).reshape(self._plan.mesh.pp, -1)
        groups = {_link(*link): pipelines[[rank[link[0]], rank[link[1]]]].T.tolist() for link in links}
        for stages in sorted(set(self._stages.partition.shared_parameters.values())):
            ranks = sorted({rank[stage] for stage in stages})
            if len(ranks) > 1:
                groups[_sharers(stages)] = pipelines[ranks].T.tolist()
        self._groups = self._world.groups(groups)
        self._peers = dict(enumerate(dims.ranks_along("pp")))
        # the first message opens the connection, which may block both ends (NCCL): here all ranks do so in one order
        for link in links:
            if _link(*link) in self._groups:
                token = torch.zeros(1, device=self._device)
                with self._world.explain_errors(f"connecting stages {link[0]} and {link[1]}"):
                    exchange = self._isend if link[0] in self._stages.stage_ids else self._irecv
                    exchange(token, *link).wait()

    # --- steps -------------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        micros: Sequence[Micro],
        forward: Callable[[Micro], Any],
        loss: Callable[[Any, Micro], Tensor],
        before_last_backward: Callable[[Sequence[nn.Module] | None], None],
        around: Callable[[str, Micro], AbstractContextManager[Any]],
    ) -> None:
        """Run one step: accumulate the gradients of ``loss`` in this rank's parameters.

        Args:
            forward: Calls the model on a micro-batch.
            loss: (outputs, micro-batch) -> loss [], on the last stage only.
            before_last_backward: Called with a stage's blocks before its last backward pass, and with None before the
                last backward pass of all; never called if weight gradients are delayed (zbv).
            around: (``"forward"`` or ``"backward"``, micro-batch) -> the context in which the pass runs.
        """
        plan = self._plan
        actions = schedule_order(plan.pipeline.schedule, plan.mesh.pp, plan.stages_per_rank, len(micros))[self._rank]
        pending: dict[tuple[int, int], PendingGradients] = {}
        last = {action.stage: number for number, action in enumerate(actions) if action.kind in "BI"}
        try:
            for number, action in enumerate(actions):
                self._post_next(actions[number:], micros)
                if number == last[action.stage] and self._weights is None:
                    before_last_backward(None if number == max(last.values()) else self._stages.blocks_of(action.stage))
                micro = micros[action.micro]
                with self.around_pass(action):
                    if action.kind == "F":
                        self._forward(action, micros, forward, loss, around("forward", micro))
                    elif action.kind == "B":
                        self._backward(action, around("backward", micro))
                    elif action.kind == "W":
                        with around("backward", micro):
                            WeightGradients.accumulate(pending.pop(action[1:]))
                    else:
                        assert self._weights is not None
                        with self._weights.collect() as pending[action[1:]]:
                            self._backward(action, around("backward", micro))
            self._finish_sending()
        finally:
            self._forget()

    def evaluate(self, micros: Sequence[Micro], forward: Callable[[Micro], Any]) -> list[Any]:
        """Run forward passes only, of any number of micro-batches.

        Returns the model's output for each of ``micros`` on the rank with the last stage, and None for each on other ranks.
        """
        plan = self._plan
        actions = forward_order(plan.pipeline.schedule, plan.mesh.pp, self._rank, plan.stages_per_rank, len(micros))
        outputs: list[Any] = [None] * len(micros)
        try:
            with torch.no_grad():
                for number, action in enumerate(actions):
                    self._post_next(actions[number:], micros)
                    output = self._pass(action, self._input(action, micros), micros, forward)
                    if action.stage == self._stages.num_stages - 1:
                        outputs[action.micro] = output
                    else:
                        self._send_hidden(action, output, micros)
            self._finish_sending()
        finally:
            self._forget()
        return outputs

    @property
    def shared_parameter_groups(self) -> list[tuple[ProcessGroup, list[str]]]:
        """Process groups and the parameters that their stages share, for ``ShardedParameters.sum_partial_grads``."""
        shared: dict[str, list[str]] = {}
        for name, stages in sorted(self._stages.partition.shared_parameters.items()):
            shared.setdefault(_sharers(stages), []).append(name)
        return [(self._groups[sharers], names) for sharers, names in shared.items() if sharers in self._groups]

    # --- passes ------------------------------------------------------------------------------------------------------

    def _input(self, action: Action, micros: Sequence[Micro]) -> Tensor | None:
        """The hidden state that the stage receives; None for the first stage."""
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
        received = self._input(action, micros)
        with around:
            output = self._pass(action, received, micros, forward)
            if action.stage == self._stages.num_stages - 1:
                output = loss(output, micros[action.micro])
        if action.stage < self._stages.num_stages - 1:
            self._send_hidden(action, output, micros)
        self._activations[action[1:]] = received, output

    def _backward(self, action: Action, around: AbstractContextManager[Any]) -> None:
        gradient = None if action.stage == self._stages.num_stages - 1 else self._receive(action, ())
        received, output = self._activations.pop(action[1:])
        if output.requires_grad:  # a first stage may have no trained parameter
            with around, self._world.explain_collective_errors("backward pass"):
                count_in_backward(output)
                torch.autograd.backward(output, gradient)
        if received is not None:
            self._send(action, received.grad if received.grad is not None else torch.zeros_like(received))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _source(self, action: Action) -> Action:
        """The action, of a neighbouring stage, whose result ``action`` receives."""
        return action._replace(stage=action.stage + (-1 if action.kind == "F" else 1))

    def _is_remote(self, action: Action) -> bool:
        """Whether ``action`` receives from another rank; the ends of the pipeline receive nothing."""
        stage = self._source(action).stage
        return action.kind != "W" and 0 <= stage < self._stages.num_stages and self._rank_of_stage[stage] != self._rank

    def _spec(self, action: Action, micros: Sequence[Micro]) -> Spec | None:
        """Shape and dtype of the tensor that ``action`` receives, if they are known."""
        if action.kind == "F":
            return self.hidden_states.get((action.stage, _shapes(micros[action.micro])))
        activations = self._activations.get(action[1:])
        return None if activations is None else (activations[1].shape, activations[1].dtype)

    def _post_next(self, actions: Sequence[Action], micros: Sequence[Micro]) -> None:
        """Post the receive of the first action, and of the next action that receives, if their specs are known. A header would
        have to be waited for, and its sender may be waiting for this rank."""
        later = [action for action in actions[1:] if self._is_remote(action)][:1]
        for action in [*(action for action in actions[:1] if self._is_remote(action)), *later]:
            spec = self._spec(action, micros)
            if spec is None:
                return  # later messages of the same link must not overtake
            if action not in self._posted:
                buffer = torch.empty(spec[0], dtype=spec[1], device=self._device)
                with self._world.explain_collective_errors("receive from another stage"):
                    self._posted[action] = self._irecv(buffer, self._source(action).stage, action.stage), buffer

    def _receive(self, action: Action, micros: Sequence[Micro]) -> Tensor:
        source = self._source(action)
        if not self._is_remote(action):
            return self._local.pop(source)
        with self._world.explain_collective_errors(f"receive from stage {source.stage}"):
            if action not in self._posted:  # its spec was not known
                if self._world.is_simulated:
                    raise UnknownHiddenState
                header = torch.zeros(_MAX_DIMS + 2, dtype=torch.int64, device="cpu")
                self._irecv(header, source.stage, action.stage).wait()
                code, dims, *sizes = header.tolist()
                self.hidden_states[action.stage, _shapes(micros[action.micro])] = (
                    torch.Size(sizes[:dims]),
                    _DTYPES[code],
                )
                self._post_next([action], micros)
            work, buffer = self._posted.pop(action)
            work.wait()
        return buffer

    def _send_hidden(self, action: Action, hidden: Tensor, micros: Sequence[Micro]) -> None:
        key, spec = (action.stage + 1, _shapes(micros[action.micro])), (hidden.shape, hidden.dtype)
        if key not in self.hidden_states:
            _check(hidden)
            self.hidden_states[key] = spec
            if self._rank_of_stage[action.stage + 1] != self._rank:
                header = [_DTYPES.index(hidden.dtype), hidden.dim(), *hidden.shape]
                header += [0] * (_MAX_DIMS + 2 - len(header))
                self._start_send(torch.tensor(header, device="cpu"), action.stage, action.stage + 1)
        elif self.hidden_states[key] != spec:
            raise PlanError(
                given=f"a hidden state of {list(spec[0])} {spec[1]} behind stage {action.stage}, before "
                f"{list(self.hidden_states[key][0])} {self.hidden_states[key][1]} from inputs of the same shapes",
                rule="the shape of what stages pass on follows from the shapes of the inputs",
                consequence="the next stage would not know how much to receive",
                nearest="plan.pp=1, or inputs whose shapes say it",
            )
        self._send(action, hidden)

    def _send(self, action: Action, result: Tensor) -> None:
        receiver = action.stage + (1 if action.kind == "F" else -1)
        if self._rank_of_stage[receiver] == self._rank:
            self._local[action] = result.detach()
        else:
            self._start_send(result.detach().contiguous(), action.stage, receiver)

    def _start_send(self, tensor: Tensor, sender: int, receiver: int) -> None:
        self._sending = [(work, sent) for work, sent in self._sending if not self.is_sent(work)]
        with self._world.explain_collective_errors(f"send to stage {receiver}"):
            self._sending.append((self._isend(tensor, sender, receiver), tensor))

    def _finish_sending(self) -> None:
        with self._world.explain_collective_errors("send to another stage"):
            for work, _ in self._sending:
                work.wait()

    def _forget(self) -> None:
        for store in (self._sending, self._posted, self._local, self._activations):
            store.clear()

    def _isend(self, tensor: Tensor, sender: int, receiver: int) -> Any:
        peer, group = self._peers[self._rank_of_stage[receiver]], self._groups[_link(sender, receiver)]
        count_message(group, tensor)
        return dist.isend(tensor, peer, group=group)

    def _irecv(self, tensor: Tensor, sender: int, receiver: int) -> Any:
        peer = self._peers[self._rank_of_stage[sender]]
        return dist.irecv(tensor, peer, group=self._groups[_link(sender, receiver)])


def _plain(action: Action) -> AbstractContextManager[Any]:
    return nullcontext()


def _is_completed(work: Any) -> bool:
    return bool(work.is_completed())


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
