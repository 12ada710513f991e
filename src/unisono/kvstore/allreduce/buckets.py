"""Bucketed gradient all-reduce, overlapped with the backward pass, in an order fixed by the parameters alone.

torch's DistributedDataParallel rebuilds its buckets after the first iteration in the order in which gradients arrived,
so with three or more ranks a resumed process adds in another order than the one it continues. Here bucket contents and
launch order are a pure function of names, shapes and dtypes, equal in every process from the first step.

Where all ranks share a host and the gradients are in host memory, they are summed through shared memory
(``shared_memory``), in rank order; with three or more ranks this may differ from Gloo's sum in the last bit. The choice
depends on hosts and devices only, and ``transport`` reports it. These sums start after the backward pass, because they use
the same cores: with 2 ranks on 2 cores a step of 4 M parameters took 70 ms with Gloo, 52 ms this way and 53 ms with an
overlapping thread; of 21 M parameters 301, 255 and 263 ms.

With a codec, compressed gradients are sent instead (``kvstore.compression``); order and overlap stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from unisono.dist import World
from unisono.dist.roll_call import host_id
from unisono.errors import CheckpointError, ConfigError
from unisono.kvstore.allreduce.network import hierarchical_all_reduce, is_hierarchy_useful
from unisono.kvstore.allreduce.shared_memory import SharedMemoryAllReduce
from unisono.kvstore.compression import Codec, PowerSGD, compressed_sum
from unisono.plan.plan import BUCKET_BYTES

COMPRESSED: Final = "compressed"  # the end of the transport's description with a codec


class _Bucket:
    """A flat buffer whose slices are the gradients of some parameters."""

    def __init__(self, members: list[tuple[str, nn.Parameter]], reduce_dtype: torch.dtype) -> None:
        self.names = [name for name, _ in members]
        first = members[0][1]
        self.flat = torch.zeros(sum(p.numel() for _, p in members), dtype=_dtype(first), device=first.device)
        # what is sent: the gradients themselves, or a copy in another dtype
        self._reduce_dtype, self.comm_buffer = reduce_dtype, self.flat
        self.views: dict[str, Tensor] = {}
        start = 0
        for name, parameter in members:
            self.views[name] = self.flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self.num_pending = len(members)  # gradients that the last backward pass has not completed

    @property
    def comm_nbytes(self) -> int:
        """Bytes of the tensor to sum."""
        return self.flat.numel() * self._reduce_dtype.itemsize

    def pack(self) -> Tensor:
        """The tensor to sum over ranks, [elements]."""
        self.comm_buffer = self.flat.to(self._reduce_dtype)
        return self.comm_buffer

    def unpack(self) -> None:
        """Copy the sums back into the gradients."""
        if self.comm_buffer is not self.flat:
            self.flat.copy_(self.comm_buffer)
            self.comm_buffer = self.flat


class BucketedAllReduce:
    """Gradient synchronisation through flat buckets, last parameter first, roughly the order in which backward
    completes them.

    A bucket is sent once its gradients are complete and all buckets before it were sent, so every rank issues the same
    collectives in the same order, whatever its autograd threads do. Gradients are summed over ``group``, or over all
    ranks. ``reduce_dtypes``: by name the dtype to send and add in, if not the gradient's own; ``codec`` compresses
    instead. With a codec every step ends with ``commit``, and ``state_dict`` is checkpointed state of this rank.

    ``transport``: "shared memory", or a torch backend and the reason for it. ``num_workers``: how many ranks sum.
    ``sent_bytes`` and ``received_bytes`` count what this rank gives to the sums and gets from them, not the transport's
    traffic (a ring sends 2 (n - 1) / n of it); ``num_collectives`` how many collectives that took. The constructor is a
    collective over all ranks of ``world``. Raises ConfigError for a codec together with ``reduce_dtypes``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        world: World,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        group: ProcessGroup | None = None,
        reduce_dtypes: Mapping[str, torch.dtype] | None = None,
        codec: Codec | PowerSGD | None = None,
    ) -> None:
        if codec is not None and reduce_dtypes:
            raise _codec_with_reduce_dtypes(codec, reduce_dtypes)
        self._world, self._group = world, group or world.group
        self.num_workers = self._group.size() if self._group is not None else 1
        self._parameters = dict(parameters)
        comm_dtypes = {name: (reduce_dtypes or {}).get(name, _dtype(p)) for name, p in self._parameters.items()}
        self._buckets = [
            _Bucket(members, comm_dtypes[members[0][0]])
            for members in _partition(self._parameters, bucket_bytes, comm_dtypes)
        ]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        views = {name: self._bucket_of[name].views[name] for name in self._parameters}
        self._exchange = None if codec is None else compressed_sum(codec, views, self._group)
        self._memory: SharedMemoryAllReduce | None = None
        self._sum: Callable[[Tensor], Any] = partial(dist.all_reduce, group=self._group, async_op=True)
        self.transport = self._choose_transport() if codec is None else f"{transport_name(self._group)}: {COMPRESSED}"
        self.sent_bytes = self.received_bytes = self.num_collectives = 0
        self._is_last_backward = False
        self._next = 0
        self._pending: list[Any] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))
            for name, parameter in self._parameters.items()
        ]
        self.zero_grad()

    def _hook(self, name: str) -> Any:
        bucket = self._bucket_of[name]
        view = bucket.views[name]

        def ready(parameter: Tensor) -> None:
            grad = parameter.grad
            if grad is not None and grad is not view:
                # the view was replaced, by zero_grad(set_to_none=True) for example: copy the values and restore it
                view.copy_(grad)
                parameter.grad = view
            if self._is_last_backward:
                bucket.num_pending -= 1
                self._launch(only_complete=True)

        return ready

    def _choose_transport(self) -> str:
        """Choose the transport, the same on all ranks; returns its description. Also sets ``_sum`` and ``_memory``."""
        by = transport_name(self._group)
        if self.num_workers == 1:
            return "nothing is sent: no other rank has these parameters"
        if self._group is None or self._group.size() < self._world.world_size:
            return f"{by}: a group of some of the workers"
        hosts: list[str] = self._world.all_gather_json(host_id())
        if is_hierarchy_useful(hosts):
            self._sum = hierarchical_all_reduce(self._world, hosts)
            return f"{by}: over the workers of each host, then across {len(set(hosts))} hosts"
        if not all(self._world.all_gather_json(all(p.device.type == "cpu" for p in self._parameters.values()))):
            return f"{by}: gradients on devices"
        if self._world.backends["cpu"] != "gloo":
            return f"{by}: it carries what ranks of this host exchange too"
        try:
            self._memory = SharedMemoryAllReduce(self._world)
        except ConfigError as refusal:
            return f"{by}: {refusal.problems[0].given}"
        self._sum = self._memory.all_reduce
        return "shared memory"

    @property
    def bucket_nbytes(self) -> list[int]:
        """Bytes of each sum of a step, without compression."""
        return [bucket.comm_nbytes for bucket in self._buckets]

    def prepare_last_backward(self, part: Sequence[nn.Module] | None = None) -> None:
        """The next backward pass is the step's last: a bucket is sent once its gradients are complete and all buckets
        before it were sent. With ``part`` (one pipeline stage) this does nothing, and ``wait`` sends all buckets."""
        if part is not None:
            return
        self._is_last_backward, self._next = True, 0
        for bucket in self._buckets:
            # a parameter may be frozen in this step: no gradient of it comes
            bucket.num_pending = sum(self._parameters[name].requires_grad for name in bucket.names)

    def _launch(self, *, only_complete: bool) -> None:
        if only_complete and self._memory is not None:
            return
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if only_complete and bucket.num_pending:
                return
            with self._world.explain_errors("gradient all-reduce"):
                if self._exchange is not None:
                    pending = self._exchange.launch(bucket.views)
                    self._count(pending.sent_bytes, pending.received_bytes, pending.num_collectives)
                    self._pending.append(pending)
                else:
                    sent = bucket.pack()
                    self._count(sent.nbytes, sent.nbytes)
                    self._pending.append(self._sum(sent))
            self._next += 1

    def _count(self, sent_bytes: int, received_bytes: int, num_collectives: int = 1) -> None:
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        self.num_collectives += num_collectives

    def wait(self, totals: Tensor) -> None:
        """Send the buckets that were not sent yet (incomplete where no sample of this rank used a parameter), sum
        ``totals`` over all ranks, and wait for everything."""
        self._launch(only_complete=False)
        self._is_last_backward, self._next = False, 0  # the next step may come without prepare_last_backward
        with self._world.explain_errors("gradient all-reduce"):
            whole = self._exchange is None and (self._group is None or self._group.size() == self._world.world_size)
            sum_all_ranks = self._sum if whole else partial(dist.all_reduce, group=self._world.group, async_op=True)
            self._pending.append(sum_all_ranks(totals))
            for work in self._pending:
                work.wait()
        self._pending.clear()
        for bucket in self._buckets:
            bucket.unpack()

    def gradients(self) -> list[Tensor]:
        """Views into the buckets, in parameter order."""
        return [self._bucket_of[name].views[name] for name in self._parameters]

    def zero_grad(self) -> None:
        """Zero the buckets and make every gradient a view again."""
        for bucket in self._buckets:
            bucket.flat.zero_()
        for name, parameter in self._parameters.items():
            parameter.grad = self._bucket_of[name].views[name]

    def commit(self, good: Tensor | bool) -> None:
        """End the step; where ``good`` (0-dim bool, on the device) is false, residuals stay bit-equal."""
        if self._exchange is not None:
            self._exchange.commit(good)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's residuals by parameter name; empty without a codec."""
        return {} if self._exchange is None else self._exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError for a state of other parameters or another codec."""
        if self._exchange is not None:
            self._exchange.load_state_dict(state)
        elif state:
            raise _unused_residuals(state)

    def stats(self) -> dict[str, dict[str, float]]:
        """Compression statistics by parameter, see ``ErrorFeedback.stats``."""
        return {} if self._exchange is None else self._exchange.stats()

    def close(self) -> None:
        """Remove the hooks and drop the gradients. Not a collective."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters.values():
            parameter.grad = None


def _codec_with_reduce_dtypes(codec: Codec | PowerSGD, reduce_dtypes: Mapping[str, torch.dtype]) -> ConfigError:
    name = next(iter(reduce_dtypes))
    return ConfigError(
        given=f"compression {codec.name!r}, and gradients such as that of {name!r} sent as {reduce_dtypes[name]}",
        rule="a gradient is either compressed or sent in another dtype",
        consequence="the other would act on nothing, so nothing was started",
        nearest="leave compression out, or let gradients be reduced in their own dtype",
    )


def _unused_residuals(state: Mapping[str, Tensor]) -> CheckpointError:
    return CheckpointError(
        given=f"the checkpoint holds residuals of compression, such as {min(state)!r}; this run has no compression",
        rule="a run continues with the compression it had",
        consequence="they would be lost, so nothing was loaded",
        nearest="resume with the compression of the checkpoint, or start a new run from its weights",
    )


def transport_name(group: ProcessGroup | None) -> str:
    """The name of the torch backend behind ``group``."""
    return "alone" if group is None else dist.get_backend(group)


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of the parameter's gradient."""
    return parameter.grad_dtype or parameter.dtype


def _partition(
    parameters: Mapping[str, nn.Parameter], bucket_bytes: int, reduce_dtypes: Mapping[str, torch.dtype]
) -> list[list[tuple[str, nn.Parameter]]]:
    """Split the parameters, last first, into runs of one dtype, one communication dtype and one device, of at most
    ``bucket_bytes``."""
    buckets: list[list[tuple[str, nn.Parameter]]] = []
    size, last = 0, None
    for name, parameter in reversed(list(parameters.items())):
        nbytes = parameter.numel() * _dtype(parameter).itemsize
        kind = (_dtype(parameter), reduce_dtypes[name], parameter.device)
        same = kind == last
        if not same or size + nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append((name, parameter))
        size, last = size + nbytes, kind
    return buckets
