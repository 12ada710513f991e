"""Cross-entropy over a vocabulary, computed in chunks of tokens without the full matrix of logits.

For N tokens and a vocabulary of V the logits and their gradient take N·V·(2+4) bytes, often the peak of a training step. Here
the logits of each chunk are computed, reduced to their loss, turned into gradients and dropped. This takes three matrix
products per chunk, as many as the direct computation, and chunk·V floats of memory. If the vocabulary is sharded over ranks,
they exchange two numbers per token, and no rank has all logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.models.layers import matmul_dtype

# a target that does not count, as in torch's cross-entropy
IGNORED = -100


class VocabSharding(Protocol):
    """Interface of an output matrix whose rows, the vocabulary, are sharded over ranks."""

    def enter(self, hidden: Tensor) -> Tensor:
        """The identity on ``hidden``; its gradient is summed over the ranks."""
        ...

    def place(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Local row of each token, 0 for a token of another rank, and whether the row is local."""
        ...

    def combine(self, log_norm: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Combine over the ranks: the logsumexp of the local ``log_norm``, and the sum of ``chosen``."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """Gather local logits into all logits [..., vocab]."""
        ...


class LazyLogits(NamedTuple):
    """The output of a language model: last hidden states and output matrix, not yet multiplied.

    Args:
        hidden: [..., dim], in autocast's dtype if autocast was on.
        weight: [vocab, dim], or this rank's rows of it with ``vocab_sharding``.
        chunk_rows: Rows of logits in memory at a time.
        vocab_sharding: How the vocabulary is sharded over ranks; results are the same on every rank.
        compute: Dtype of the products. By default logits have the weight's dtype, and the loss uses autocast's.
    """

    hidden: Tensor
    weight: Tensor
    chunk_rows: int
    vocab_sharding: VocabSharding | None = None
    compute: torch.dtype | None = None

    def logits(self) -> Tensor:
        """Compute all logits [..., vocab]."""
        return self._times_weight(self.hidden)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, logits [rows, vocab]) for chunks of the flattened tokens."""
        flat = self.hidden.flatten(0, -2)  # [N, dim]
        for start in range(0, flat.shape[0], self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, flat.shape[0]))
            yield rows, self._times_weight(flat[rows])

    def _times_weight(self, hidden: Tensor) -> Tensor:
        dtype = self.compute or self.weight.dtype
        hidden, weight = hidden.to(dtype), self.weight.to(dtype)
        with torch.autocast(
            hidden.device.type, enabled=torch.is_autocast_enabled(hidden.device.type) and not self.compute
        ):
            if self.vocab_sharding is None:
                return F.linear(hidden, weight)
            return self.vocab_sharding.gather(F.linear(self.vocab_sharding.enter(hidden), weight))


def cross_entropy_sum(head: LazyLogits, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of token losses in nats, and the sum of the weights; both 0-dim float32 on the device.

    Args:
        head: Output of the model, hidden states [..., dim].
        targets: [...] int64; -100 does not count, whatever its weight.
        weights: [...] float.
    """
    targets = targets.flatten()
    counts = targets != IGNORED
    flat_weights = weights.flatten().float() * counts
    hidden = head.hidden.flatten(0, -2)
    hidden = hidden.to(head.compute or matmul_dtype(hidden))
    if head.vocab_sharding is not None:
        hidden = head.vocab_sharding.enter(hidden)
    loss: Tensor = _ChunkedCrossEntropy.apply(
        hidden, head.weight, targets.where(counts, 0), flat_weights, head.chunk_rows, head.vocab_sharding
    )  # pyright: ignore[reportAssignmentType]
    return loss, flat_weights.sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Forward computes the loss and the required gradients for an upstream gradient of 1; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        chunk: int,
        part: VocabSharding | None,
    ) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        ctx.weight_dtype = weight.dtype
        weight = weight.to(hidden.dtype)  # in here: its float32 gradient is not rounded
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in (slice(i, i + chunk) for i in range(0, hidden.shape[0], chunk)):
                x, y, w = hidden[rows], targets[rows, None], weights[rows, None]  # [n, dim], [n, 1], [n, 1]
                logits = F.linear(x, weight).float()  # [n, vocab]
                log_norm = logits.logsumexp(-1, keepdim=True)  # [n, 1]
                if part is None:
                    chosen, hit = logits.gather(-1, y), torch.ones_like(w)  # [n, 1], [n, 1]
                else:
                    y, here = part.place(y)
                    log_norm, chosen = part.combine(log_norm, logits.gather(-1, y).where(here, 0))
                    hit = here.to(w.dtype)
                loss += ((log_norm - chosen) * w).sum()
                if not (need_hidden or need_weight):
                    continue
                # d loss / d logits = w · (softmax − onehot), computed in the memory of the logits
                grad = logits.sub_(log_norm).exp_().scatter_add_(-1, y, -hit).mul_(w).to(x.dtype)
                if grad_hidden is not None:
                    torch.mm(grad, weight, out=grad_hidden[rows])
                if grad_weight is not None:
                    grad_weight += grad.mT @ x
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        (upstream,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * upstream.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * upstream).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
        )
