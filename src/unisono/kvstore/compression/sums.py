"""The compressed sum of gradients over a process group: launched during the backward pass, finished after it.

Codes that may be added are all-reduced. All others are gathered, and every rank decodes and adds them in rank order, so
all ranks hold the same bits. Gathering moves n - 1 codes to each rank: with n workers and ratio r it is faster than an
all-reduce of the gradients only for n < 2r (int8: 8 workers, 2 bits: 32). Each parameter has its own code, so bucket
sizes change no number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from unisono.kvstore.compression.codec import Codec, accumulation_dtype
from unisono.kvstore.compression.error_feedback import CommittedTensors, ErrorFeedback
from unisono.kvstore.compression.quantize import Cast


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A running collective, the function that turns its result into gradients, the bytes this rank sends and receives, and
    the number of collectives they take."""

    work: Any
    then: Callable[[], None]
    sent_bytes: int
    received_bytes: int
    num_collectives: int = 1

    def wait(self) -> None:
        """Return when the gradients hold the sums."""
        self.work.wait()
        self.then()


class CompressedSum(Protocol):
    """Sums gradients over a group and keeps the residuals."""

    def launch(self, gradients: Mapping[str, Tensor]) -> PendingSum:
        """Start the sum, on all ranks in the same order; ``wait`` overwrites ``gradients`` with it, also in the same
        order."""
        ...

    def commit(self, good: Tensor | bool) -> None:
        """End the step; where ``good`` (0-dim bool) is false, it leaves no trace."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's residuals and factors."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError for a state of other parameters or another codec."""
        ...

    def stats(self) -> dict[str, dict[str, float]]:
        """Compression statistics, see ``ErrorFeedback.stats``."""
        ...


def compressed_sum(
    codec: Codec | PowerSGD, gradients: Mapping[str, Tensor], group: ProcessGroup | None
) -> CompressedSum:
    """The compressed sum of tensors like ``gradients`` over ``group``, None for the default group."""
    if isinstance(codec, PowerSGD):
        return PowerSGDSum(codec, gradients, group)
    return CodecSum(codec, gradients, group)


class CodecSum:
    """The sum of codes of any codec."""

    def __init__(self, codec: Codec, gradients: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)
        self._codec = codec.over(self._ranks) if isinstance(codec, Cast) else codec
        self._feedback = ErrorFeedback(gradients, worker=dist.get_rank(group))
        self.commit, self.stats = self._feedback.commit, self._feedback.stats
        self.state_dict, self.load_state_dict = self._feedback.state_dict, self._feedback.load_state_dict

    @torch.no_grad()
    def launch(self, gradients: Mapping[str, Tensor]) -> PendingSum:
        code = torch.cat([self._feedback.encode(self._codec, name, g) for name, g in gradients.items()])
        if self._codec.summable is not None:
            rows = code[None]
            received_bytes = code.nbytes
            work = dist.all_reduce(code.view(self._codec.summable), group=self._group, async_op=True)
        else:
            rows = code.new_empty(self._ranks, code.numel())  # [ranks, bytes]
            received_bytes = rows.nbytes - code.nbytes
            work = dist.all_gather(list(rows.unbind()), code, group=self._group, async_op=True)
        return PendingSum(work, lambda: self._add(rows, gradients), code.nbytes, received_bytes)

    @torch.no_grad()
    def _add(self, rows: Tensor, gradients: Mapping[str, Tensor]) -> None:
        start = 0
        for gradient in gradients.values():
            numel = gradient.numel()
            end = start + self._codec.encoded_bytes(numel)
            total = torch.zeros(numel, dtype=accumulation_dtype(gradient.dtype), device=gradient.device)
            for row in rows:
                total += self._codec.decode(row[start:end], numel, total.dtype, trusted=True)
            gradient.copy_(total.view_as(gradient))
            start = end


class PowerSGDSum:
    """PowerSGD. Tensors without smaller factors are sent uncompressed, together with the first factors."""

    def __init__(self, codec: PowerSGD, gradients: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
        self._codec, self._group = codec, group
        matrices = {name: matrix for name, g in gradients.items() if (matrix := self._matrix(g)) is not None}
        self._feedback = ErrorFeedback({name: gradients[name] for name in matrices})
        self._factors = CommittedTensors({name: codec.first_factor(name, matrix) for name, matrix in matrices.items()})

    def _matrix(self, gradient: Tensor) -> Tensor | None:
        return self._codec.matrix(gradient.to(accumulation_dtype(gradient.dtype)))

    @torch.no_grad()
    def launch(self, gradients: Mapping[str, Tensor]) -> PendingSum:
        uncompressed = {name: g for name, g in gradients.items() if self._matrix(g) is None}
        matrices: dict[str, Tensor] = {}  # gradient plus residual, [rows, columns]
        for name, gradient in gradients.items():
            if name not in uncompressed:
                flat = self._feedback.compensated(name, gradient)
                matrices[name] = flat.view(gradient.shape[0], -1)
        left = {name: matrix @ self._factors[name] for name, matrix in matrices.items()}  # P, [rows, rank]
        sent, parts = _joined([*(g.to(accumulation_dtype(g.dtype)) for g in uncompressed.values()), *left.values()])
        work = dist.all_reduce(sent, group=self._group, async_op=True)

        def then() -> None:
            for gradient, total in zip(uncompressed.values(), parts, strict=False):
                gradient.copy_(total)
            bases = dict(zip(matrices, map(orthonormal, parts[len(uncompressed) :]), strict=True))
            self._second(gradients, matrices, bases)

        both = sent.nbytes + sum(
            self._factors[name].nbytes for name in matrices
        )  # the second factors are of the first's shape
        return PendingSum(work, then, both, both, num_collectives=2 if matrices else 1)

    @torch.no_grad()
    def _second(self, gradients: Mapping[str, Tensor], matrices: dict[str, Tensor], bases: dict[str, Tensor]) -> None:
        if not matrices:
            return
        right = {name: matrix.T @ bases[name] for name, matrix in matrices.items()}  # Q, [columns, rank]
        for name, matrix in matrices.items():
            nbytes = (bases[name].numel() + right[name].numel()) * matrix.itemsize
            decoded = bases[name] @ right[name].T
            self._feedback.record_sent(name, matrix.view(-1), decoded.view(-1), gradients[name].nbytes, nbytes)
        sent, parts = _joined(list(right.values()))
        dist.all_reduce(sent, group=self._group)
        for name, total in zip(matrices, parts, strict=True):
            gradients[name].copy_((bases[name] @ total.T).view_as(gradients[name]))
            self._factors.propose(name, total)

    def commit(self, good: Tensor | bool) -> None:
        self._feedback.commit(good)
        self._factors.commit(good)

    def state_dict(self) -> dict[str, Tensor]:
        factors = {f"factor/{name}": value for name, value in self._factors.state_dict().items()}
        return self._feedback.state_dict() | factors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        factors = {name: value for name, value in state.items() if name.startswith("factor/")}
        self._factors.load_state_dict({name.removeprefix("factor/"): value for name, value in factors.items()})
        self._feedback.load_state_dict({name: value for name, value in state.items() if name not in factors})

    def stats(self) -> dict[str, dict[str, float]]:
        return self._feedback.stats()


def _joined(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """One flat copy of all tensors, and each one's view in it."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = flat.split([tensor.numel() for tensor in tensors])
    return flat, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """PowerSGD (Vogels et al. 2019, arXiv:1905.13727): per step one power iteration towards the best low-rank
    approximation.

    P = sum of M Q, orthonormalised; Q = sum of M' P; the sum of all M is about P Q'. Both sums are plain all-reduces,
    and Q starts the next step's iteration. The orthonormal columns come from a Householder QR, which exists for any P:
    the paper's Gram-Schmidt needs an epsilon for a zero gradient and leaves Q at zero for ever. This is not a
    ``Codec``: the second message depends on the sum of the first, so only groups that all-reduce can use it.
    """

    name: str
    rank: int

    def matrix(self, value: Tensor) -> Tensor | None:
        """``value`` as [rows, columns] if it has at least two dims and smaller factors, else None."""
        if value.dim() < 2 or value.numel() == 0:
            return None
        matrix = value.reshape(value.shape[0], -1)
        rows, columns = matrix.shape
        return matrix if self.rank < min(rows, columns) and self.rank * (rows + columns) < rows * columns else None

    def first_factor(self, name: str, matrix: Tensor) -> Tensor:
        """Q of the first step, [columns, rank]: noise keyed by the parameter's name, so equal on all ranks."""
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        noise = torch.randn(
            matrix.shape[1], self.rank, generator=torch.Generator().manual_seed(seed), dtype=matrix.dtype, device="cpu"
        )
        return noise.to(matrix.device)


def orthonormal(factor: Tensor) -> Tensor:
    """An orthonormal basis [rows, rank] of the columns of ``factor``."""
    return torch.linalg.qr(factor).Q
