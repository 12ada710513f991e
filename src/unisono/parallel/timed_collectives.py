"""torch's collectives that a pass waits for: timed by the mesh axis of their group, and their bytes counted by group.

The time in them is exposed communication: what computes waits for it. It is counted inside ``recording_exposed_time``, on the
thread that has entered it, and on the one that torch runs a backward pass on, if ``count_in_backward`` was called for it. It is
not counted in compiled graphs, which the compiler traces, for collectives that DTensor issues, and on an accelerator for those
of FSDP2, which runs them on streams of its own.

Bytes are counted in the same places, and for FSDP2 on every device. Its gathers and reduce-scatters are counted as they are
issued, through the interface that torch has for a library's own (``set_custom_all_gather``, ``set_custom_reduce_scatter``); its
sums over replicas through ``set_all_reduce_hook``, which torch calls after each with the tensor that was summed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from unisono.observe.meters import StepTimers
from unisono.parallel.traffic import Traffic, axis_of

# torch 2.13 calls them so, and warns of the names that 2.11 and 2.12 have
_torch: Any = dist
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or _torch.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor


@dataclass(slots=True)
class _Recorders:
    """The timers and byte counters in use; None once the context is left, also for threads that still hold this value."""

    timers: StepTimers | None
    traffic: Traffic | None


_recorders: ContextVar[_Recorders | None] = ContextVar("recorders", default=None)


@contextmanager
def recording_exposed_time(timers: StepTimers, traffic: Traffic | None = None) -> Generator[None]:
    """Inside, the time that this thread spends in the functions below is exposed communication of ``timers``, and ``traffic``
    has their bytes."""
    recorders = _Recorders(timers, traffic)
    token = _recorders.set(recorders)
    try:
        yield
    finally:
        recorders.timers = recorders.traffic = None
        _recorders.reset(token)


def count_in_backward(result: Tensor) -> None:
    """Count in the backward pass from ``result`` too, which torch runs on a thread of its own if ``result`` is on an accelerator.

    The thread that calls ``backward`` waits for that one: of the two, one at a time uses the timers.
    """
    recorders = _recorders.get()
    if recorders is None or result.grad_fn is None:
        return

    def enter(gradients: Sequence[Tensor]) -> None:
        _recorders.set(recorders)

    result.grad_fn.register_prehook(enter)


def timed_wait(group: ProcessGroup | None) -> AbstractContextManager[Any]:
    """Inside, time is exposed communication along the mesh axis of ``group``; None is the group of all ranks."""
    recorders = None if torch.compiler.is_compiling() else _recorders.get()
    timers = None if recorders is None else recorders.timers
    if timers is None:
        return nullcontext()
    return timers.comm_exposed(axis_of("" if group is None else group.group_desc))


def counted_traffic() -> Traffic | None:
    """What counts the bytes of collectives here; None outside ``recording_exposed_time``, and where the compiler traces."""
    recorders = None if torch.compiler.is_compiling() else _recorders.get()
    return None if recorders is None else recorders.traffic


def all_reduce(tensor: Tensor, group: ProcessGroup | None, op: Any = ReduceOp.SUM) -> None:
    """``tensor`` reduced over the group, in place."""
    if (traffic := counted_traffic()) is not None:
        traffic.count_all_reduce(group, tensor.nbytes)
    with timed_wait(group):
        dist.all_reduce(tensor, op=op, group=group)


def all_gather_single(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """All ranks' ``input`` [n] into ``output`` [ranks · n], in order of ranks."""
    if (traffic := counted_traffic()) is not None:
        traffic.count_all_gather(group, output.nbytes)
    with timed_wait(group):
        _all_gather_single(output, input, group=group)


def reduce_scatter_single(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """This rank's part of the summed ``input`` [ranks · n] into ``output`` [n]."""
    if (traffic := counted_traffic()) is not None:
        traffic.count_reduce_scatter(group, input.nbytes)
    with timed_wait(group):
        _reduce_scatter_single(output, input, group=group)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
) -> None:
    """Parts of ``input`` to their ranks, parts of all ranks into ``output``; equal parts unless sizes along dim 0 are given."""
    if (traffic := counted_traffic()) is not None:
        own = None if input_sizes is None else input_sizes[group.rank()] * input[:1].nbytes
        traffic.count_all_gather(group, input.nbytes, own)
    with timed_wait(group):
        dist.all_to_all_single(
            output,
            input,
            None if output_sizes is None else list(output_sizes),
            None if input_sizes is None else list(input_sizes),
            group=group,
        )


@dataclass(frozen=True, slots=True)
class FSDPCollective:
    """A collective of FSDP2's own (``torch.distributed.fsdp`` calls the interface ``AllGather`` and ``ReduceScatter``)."""

    collective: Callable[..., Any]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False, **options: Any
    ) -> Any:
        """The work to wait for if ``async_op``, else None."""
        if (traffic := counted_traffic()) is not None:
            gathers = output_tensor.nbytes > input_tensor.nbytes
            count = traffic.count_all_gather if gathers else traffic.count_reduce_scatter
            count(group, max(output_tensor.nbytes, input_tensor.nbytes))
        # the host waits for those on the CPU; elsewhere streams do
        with nullcontext() if async_op or input_tensor.device.type != "cpu" else timed_wait(group):
            return self.collective(output_tensor, input_tensor, group=group, async_op=async_op, **options)


FSDP_ALL_GATHER: Final = FSDPCollective(_all_gather_single)
FSDP_REDUCE_SCATTER: Final = FSDPCollective(_reduce_scatter_single)


def count_replica_sum(group: ProcessGroup, summed: Tensor) -> None:
    """Count a sum of FSDP2 over replicas."""
    if (traffic := counted_traffic()) is not None:
        traffic.count_all_reduce(group, summed.nbytes)


def count_message(group: ProcessGroup, tensor: Tensor) -> None:
    """Count a message to another stage."""
    if (traffic := counted_traffic()) is not None:
        traffic.count_send(group, tensor.nbytes)
