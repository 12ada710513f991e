"""The divergence of a student's classes from a teacher's, computed in chunks of rows without the full matrices of logits.

As ``models.loss`` does for cross-entropy: the logits of a chunk of both models are computed, reduced to their loss, turned into
the student's gradients and dropped. If the vocabulary of both is sharded over ranks, they exchange five numbers per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.errors import DataError
from unisono.models.layers import matmul_dtype
from unisono.models.loss import LazyLogits, VocabSharding

CHUNK_ROWS = 1024  # of logits that a model returns whole
_LEAST = torch.finfo(torch.float32).min / 4  # in place of -inf: 0 times it is 0


def divergence_sum(
    student: LazyLogits | Tensor, teacher: LazyLogits | Tensor, weights: Tensor, temperature: float
) -> Tensor:
    """Weighted sum of ``temperature``² · KL(teacher ‖ student) in nats, of the classes that both give at ``temperature``.

    Its gradient is that of the student alone. The factor keeps the gradients as large as those of the cross-entropy, whatever
    the temperature (Hinton et al. 2015, §2). Returns a 0-dim float32 on the device.

    Args:
        student: Logits [..., V] of the student.
        teacher: Logits of the teacher, of the same shape; no gradient is computed.
        weights: [...] float, of each row.
        temperature: Divisor of the logits.

    Raises:
        DataError: The shapes differ.
    """
    _check_equal_shapes(student, teacher)
    flat_weights = weights.flatten().float()
    part = student.vocab_sharding if isinstance(student, LazyLogits) else None
    rows = student.hidden if isinstance(student, LazyLogits) else student  # [..., dim], or [..., V]
    rows = rows.flatten(0, -2)
    weight = None
    if isinstance(student, LazyLogits):
        rows, weight = rows.to(student.compute or matmul_dtype(rows)), student.weight
        if part is not None:
            rows = part.enter(rows)
    with torch.no_grad():
        fixed = _TeacherRows.of(teacher)
    chunk = student.chunk_rows if isinstance(student, LazyLogits) else CHUNK_ROWS
    return _ChunkedDivergence.apply(rows, weight, fixed, flat_weights, temperature, chunk, part)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class _TeacherRows:
    """The rows of a teacher, whose logits are computed a chunk at a time.

    ``rows`` are the logits themselves if ``weight`` is None.
    """

    rows: Tensor
    weight: Tensor | None
    part: VocabSharding | None

    @staticmethod
    def of(outputs: LazyLogits | Tensor) -> _TeacherRows:
        """The rows [N, …] of a teacher's outputs."""
        if isinstance(outputs, Tensor):
            return _TeacherRows(outputs.flatten(0, -2), None, None)
        rows = outputs.hidden.flatten(0, -2)
        rows = rows.to(outputs.compute or matmul_dtype(rows))
        return _TeacherRows(rows, outputs.weight, outputs.vocab_sharding)

    def logits(self, chunk: slice, part: VocabSharding | None) -> Tensor:
        """Logits of a chunk in float32: of the classes of this rank where ``part`` shards the student's, else of all."""
        rows = self.rows[chunk]
        logits = rows if self.weight is None else F.linear(rows, self.weight.to(rows.dtype))
        if self.part is not None and part is None:
            logits = self.part.gather(logits)
        elif part is not None and self.part is None:
            _, here = part.place(torch.arange(logits.shape[-1], device=logits.device))
            logits = logits[:, here]
        return logits.float()


class _ChunkedDivergence(torch.autograd.Function):
    """Forward computes the loss and the required gradients for an upstream gradient of 1; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        teacher: _TeacherRows,
        weights: Tensor,
        temperature: float,
        chunk: int,
        part: VocabSharding | None,
    ) -> Tensor:
        need_rows, need_weight = ctx.needs_input_grad[:2]
        ctx.weight_dtype = None if weight is None else weight.dtype
        weight = None if weight is None else weight.to(rows.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        grad_rows = torch.empty_like(rows) if need_rows else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight and weight is not None else None
        with torch.autocast(rows.device.type, enabled=False):
            for place in _chunks(rows.shape[0], chunk):
                x, w = rows[place], weights[place, None]  # [n, dim or V], [n, 1]
                logits = x if weight is None else F.linear(x, weight)
                student_logits = logits.float() / temperature  # [n, V]
                teacher_logits = teacher.logits(place, part) / temperature
                divergence, difference = _row_divergence(student_logits, teacher_logits, part)
                loss += (divergence * w).sum() * temperature**2
                if grad_rows is None and grad_weight is None:
                    continue
                # d loss / d logits = temperature · w · (softmax of the student - softmax of the teacher)
                grad = difference.mul_(w * temperature).to(x.dtype)
                if grad_rows is not None and weight is None:
                    grad_rows[place] = grad
                elif grad_rows is not None and weight is not None:
                    torch.mm(grad, weight, out=grad_rows[place])
                if grad_weight is not None:
                    grad_weight += grad.mT @ x
        ctx.save_for_backward(grad_rows, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        (upstream,) = grad_outputs
        grad_rows, grad_weight = ctx.saved_tensors
        return (
            None if grad_rows is None else grad_rows * upstream.to(grad_rows.dtype),
            None if grad_weight is None else (grad_weight * upstream).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _chunks(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, count)) for start in range(0, count, chunk))


def _row_divergence(
    student_logits: Tensor, teacher_logits: Tensor, part: VocabSharding | None
) -> tuple[Tensor, Tensor]:
    """KL(teacher ‖ student) [n, 1] of logits [n, V], which are overwritten, and the difference of the probabilities [n, V]."""
    norms = torch.stack(
        [student_logits.logsumexp(-1, keepdim=True), teacher_logits.logsumexp(-1, keepdim=True)]
    )  # [2, n, 1]
    if part is not None:
        norms, _ = part.combine(norms, torch.zeros_like(norms))
    student_logits = student_logits.sub_(norms[0]).clamp_(min=_LEAST)
    teacher_logits = teacher_logits.sub_(norms[1]).clamp_(min=_LEAST)
    difference = teacher_logits - student_logits
    probabilities = teacher_logits.exp_()
    divergence = torch.linalg.vecdot(probabilities, difference)[:, None]
    if part is not None:
        _, divergence = part.combine(torch.zeros_like(divergence), divergence)
    return divergence, torch.sub(student_logits.exp_(), probabilities, out=difference)


def _check_equal_shapes(student: LazyLogits | Tensor, teacher: LazyLogits | Tensor) -> None:
    student_shape, teacher_shape = _shape(student), _shape(teacher)
    if any(a != b for a, b in zip(student_shape, teacher_shape, strict=False) if a and b) or len(student_shape) != len(
        teacher_shape
    ):
        more = (
            f"model.vocab_size={teacher_shape[-1]} of the student"
            if student_shape[:-1] == teacher_shape[:-1]
            else "a teacher for the same task"
        )
        raise DataError(
            given=f"a teacher with outputs {_shown(teacher_shape)} for a student with outputs {_shown(student_shape)}",
            rule="both have a logit of each of the same classes or tokens",
            consequence="their outputs cannot be compared; nothing was trained",
            nearest=f"a teacher with the same classes or tokenizer, or {more}",
        )


def _shape(outputs: LazyLogits | Tensor) -> list[int]:
    """Sizes [..., V]; V is 0 where the vocabulary is sharded over ranks."""
    if isinstance(outputs, Tensor):
        return list(outputs.shape)
    return [*outputs.hidden.shape[:-1], 0 if outputs.vocab_sharding is not None else len(outputs.weight)]


def _shown(shape: list[int]) -> str:
    return f"[{', '.join(str(size) if size else 'sharded' for size in shape)}]"
