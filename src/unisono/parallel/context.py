"""Context parallelism: the ranks of ``cp`` share each sequence, and all keys and values are gathered (Dubey et al. 2024, §3.3.2).

Only attention needs tokens of other ranks. A sequence of T tokens is split into 2·cp runs of r = T / (2·cp) tokens. Rank i has
runs i and 2·cp - 1 - i. Under a causal mask run n needs the first (n + 1)·r keys and computes with no others, so all ranks
compute the same number of query-key pairs:

    cp = 2      run        0        1        2        3
                rank       0        1        1        0
                keys       r       2r       3r       4r

Keys and values [B, K, T/cp, E] are gathered once per attention in the forward pass; one reduce-scatter in the backward pass sums
their gradients over the ranks. Compared with ring attention this holds all keys and values of a layer while the layer runs, and
works with any mask and any attention kernel.

In the forward pass of each block, all calls of ``F.scaled_dot_product_attention`` are replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from unisono.errors import PlanError
from unisono.parallel import context_transformers
from unisono.parallel.hooks import wrap_forward
from unisono.parallel.mesh import ParallelDims
from unisono.parallel.timed_collectives import all_gather_single, reduce_scatter_single

# names of batch entries: tokens, positions, and entries that losses and metrics sum over tokens
_TOKENS = ("tokens", "input_ids")
_POSITIONS = ("positions", "position_ids")
_COUNTED = ("targets", "labels", "weights", "target_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class _MicroBatch:
    """The current micro-batch, for attention: its sequence length T, the positions of this rank's tokens [T/cp], the document
    numbers [B, T] if there are any, and a causal mask for each run."""

    length: int
    order: Tensor
    documents: Tensor | None
    causal: tuple[Tensor, ...]


class ContextParallel:
    """This rank's part of the sequences, and attention over all parts.

        context.wrap_blocks(blocks)             # once, before recompute wraps them
        with context.micro_batch(micro):        # for the forward pass of a micro-batch, and for its backward pass
            outputs = model(**inputs(context.shard_batch(micro)))

    Outside of ``micro_batch`` a model computes complete sequences, as if it were not wrapped. If the model has a method
    ``check_length(tokens)``, it is called with the length of the complete sequences, of which its forward gets a part.

    Args:
        model: The global model, before it is sharded or wrapped.

    Raises:
        PlanError: A model of transformers does not use torch's attention.
    """

    def __init__(self, dims: ParallelDims, model: nn.Module) -> None:
        index = dims.rank_along("cp")
        self._group, self._count = dims.group("cp"), dims.plan.mesh.cp
        self._runs = (index, 2 * self._count - 1 - index)
        self._takes = set(inspect.signature(model.forward).parameters)
        self._check_length: Callable[[int], None] | None = getattr(model, "check_length", None)
        self._transformers = context_transformers.TransformersModels(model)
        self._current: _MicroBatch | None = None
        self._inside_block = False

    def shard_batch(self, micro: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take this rank's T/cp tokens of every entry whose dim 1 is the sequence; other entries stay as they are.

        T is dim 1 of ``tokens`` or ``input_ids``, else the size of dim 1 that most entries share. A model with an argument
        ``positions`` or ``position_ids`` gets them ([1, T/cp], in the complete sequence) if the batch has none. ``documents`` are
        left out, because attention has them.

        Raises:
            PlanError: T is no multiple of 2·cp, the batch has no sequences, entries nest, or targets are not per token.
        """
        length = self._length(micro)
        self._check_counted(micro, length)
        if self._check_length is not None:
            self._check_length(length)
        order = self._order(length, next(iter(micro.values())).device)
        part = {
            name: entry[:, order] if entry.dim() > 1 and entry.shape[1] == length else entry
            for name, entry in micro.items()
            if name != "documents"
        }
        part |= {name: order[None] for name in _POSITIONS if name in self._takes and name not in micro}
        return self._transformers.complete(part, micro, length)

    def _check_counted(self, micro: Mapping[str, Tensor], length: int) -> None:
        for name in _COUNTED:
            entry = micro.get(name)
            if entry is not None and (entry.dim() < 2 or entry.shape[1] != length):
                raise PlanError(
                    given=f"plan.cp={self._count} with {name} {list(entry.shape)}, for sequences of {length} tokens",
                    rule="each rank computes losses and metrics of its own tokens, so every token has an entry",
                    consequence="each sample would be judged by a part of its tokens, and counted on every rank",
                    nearest=f"{name} [B, {length}] with weight 0 where nothing is asked, or plan.cp=1 (dp_shard shares the "
                    "state as well)",
                )

    @contextmanager
    def micro_batch(self, micro: Mapping[str, Tensor]) -> Generator[None]:
        """Inside, attention covers the complete sequences of ``micro``. Recompute needs it around the backward pass too."""
        before, length = self._current, self._length(micro)
        documents = micro.get("documents") if "documents" in self._takes else self._transformers.documents(micro)
        order = self._order(length, next(iter(micro.values())).device)
        size = length // (2 * self._count)
        # These masks take no memory: kernels align them to the last key. They are a tensor subclass that cannot be created
        # under a dispatch mode (selective recompute, a count of FLOPs); torch has no public name for turning modes off.
        with _disable_current_modes():
            causal = tuple(causal_lower_right(size, (run + 1) * size) for run in self._runs)
        self._current = _MicroBatch(length=length, order=order, documents=documents, causal=causal)
        try:
            with self._transformers.masks(order, micro.get("attention_mask"), length):
                yield
        finally:
            self._current = before

    def wrap_blocks(self, blocks: Iterable[nn.Module], again: Iterable[nn.Module] = ()) -> None:
        """Replace attention in the forward pass of each block, in place, also when the block is recomputed.

        ``again`` are modules inside blocks that are recomputed alone.
        """
        for module in again:
            wrap_forward(module, self._with_attention_again)
        for block in blocks:
            wrap_forward(block, functools.partial(self._with_attention, type(block).__name__))
        self._transformers.install()

    def _with_attention(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a block of class ``name``."""
        if self._current is None:
            return forward(*args, **kwargs)
        before, self._inside_block = self._inside_block, True
        try:
            with _ReplaceAttention(self._attend) as attention:
                outputs = forward(*args, **kwargs)
        finally:
            self._inside_block = before
        if not attention.calls:
            raise PlanError(
                given=f"plan.cp={self._count} for {name}, which does not call F.scaled_dot_product_attention",
                rule="that call is where the ranks of a sequence join their parts",
                consequence="each token would see a part of its sequence only",
                nearest="that function in place of own products or of nn.MultiheadAttention, or plan.cp=1",
            )
        return outputs

    def _with_attention_again(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a module that is recomputed without the block around it."""
        if self._current is None or self._inside_block:
            return forward(*args, **kwargs)
        with _ReplaceAttention(self._attend):
            return forward(*args, **kwargs)

    def _length(self, micro: Mapping[str, Tensor]) -> int:
        for name, entry in micro.items():
            if not isinstance(entry, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise PlanError(
                    given=f"plan.cp={self._count} for a batch whose entry {name!r} is a {type(entry).__name__}",
                    rule="the ranks of cp share sequences, which are tensors [B, T, …] of the batch itself",
                    consequence="it is not known which of its parts are sequences",
                    nearest="a collate_fn or transform that gives its tensors as entries of the batch, or plan.cp=1 (dp_shard "
                    "shares the state as well)",
                )
        named = [micro[name].shape[1] for name in _TOKENS if name in micro and micro[name].dim() > 1]
        counted = [micro[name] for name in _COUNTED if name in micro]
        if not named and counted and all(entry.dim() < 2 for entry in counted):
            raise PlanError(
                given=f"plan.cp={self._count} for a batch of {_shapes(micro)}",
                rule="the ranks of cp share sequences: a batch has tokens [B, T], and targets and weights of every token",
                consequence="nothing here is a sequence: each rank would count whole samples",
                nearest="plan.cp=1 (dp_shard shares the state as well)",
            )
        sizes = Counter(entry.shape[1] for entry in micro.values() if entry.dim() > 1)
        length = named[0] if named else max(sizes, key=lambda size: (sizes[size], size), default=0)
        runs = 2 * self._count
        if length == 0 or length % runs:
            near = dict.fromkeys(max(runs, multiple * runs) for multiple in (length // runs, -(-length // runs)))
            raise PlanError(
                given=f"plan.cp={self._count} for a batch of {_shapes(micro)}",
                rule=f"dim 1 is the sequence, which is cut into {runs} equal runs",
                consequence=f"{length} tokens cannot be shared equally",
                nearest=" or ".join(f"sequences of {near_length}" for near_length in near) + ", or plan.cp=1",
            )
        return length

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``F.scaled_dot_product_attention`` of this rank's queries [B, H, T/cp, E] with the keys and values of all ranks."""
        current = self._current
        assert current is not None
        length, order, documents = current.length, current.order, current.documents
        local_length = length // self._count
        if not query.shape[-2] == key.shape[-2] == value.shape[-2] == local_length:
            sizes = f"{query.shape[-2]} queries with {key.shape[-2]} keys"
            raise PlanError(
                given=f"attention of {sizes} under plan.cp={self._count}, with sequences of {length}",
                rule=f"it is attention of a sequence to itself, of which each rank has {local_length} tokens",
                consequence="it is not known which keys are whose",
                nearest="plan.cp=1 (transformers: model.config.use_cache=False keeps no earlier keys)",
            )
        widths = [key.shape[-1], value.shape[-1]]
        key, value = _gather(torch.cat([key, value], -1), self._group).split(widths, -1)  # [B, K, T, E]
        attend = functools.partial(
            F.scaled_dot_product_attention, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
        )
        # [B, 1, T/cp, T]
        same = None if documents is None else documents[:, None, order, None] == documents[:, None, None]
        if attn_mask is not None or not is_causal:
            mask = None if attn_mask is None else self._whole_keys(attn_mask, local_length, length, order)
            return attend(query, key, value, attn_mask=_both(mask, same), is_causal=is_causal)
        outputs: list[Tensor] = []
        size = local_length // 2
        for place, (run, queries) in enumerate(zip(self._runs, query.chunk(2, -2), strict=True)):
            end = (run + 1) * size  # later keys are masked
            mask = current.causal[place]
            if same is not None:
                mask = same[:, :, place * size : (place + 1) * size, :end].tril(end - size)
            outputs.append(attend(queries, key[..., :end, :], value[..., :end, :], attn_mask=mask))
        return torch.cat(outputs, -2)

    def _order(self, length: int, device: torch.device) -> Tensor:
        """Positions in the sequence [T/cp] of this rank's tokens."""
        return torch.arange(length, device=device).view(2 * self._count, -1)[list(self._runs)].flatten()

    def _whole_keys(self, mask: Tensor, own: int, length: int, order: Tensor) -> Tensor:
        """``mask`` for this rank's queries and all keys, [..., T/cp or 1, T]."""
        queries, keys = mask.shape[-2:]
        if keys == own and queries == 1:
            gathered = _gather(mask.to(torch.uint8 if mask.dtype == torch.bool else mask.dtype).mT, self._group).mT
            return gathered.to(mask.dtype)
        if keys == length and queries in (1, own):
            return mask
        if keys == length and queries == length:
            return mask[..., order, :]
        raise PlanError(
            given=f"an attention mask {list(mask.shape)} under plan.cp={self._count}, with sequences of {length}",
            rule=f"each rank has {own} queries, and all {length} keys",
            consequence="a mask that the model made of its part of the sequence says nothing of the other keys",
            nearest="no mask and is_causal=True, a mask of keys [B, 1, 1, T/cp], documents in the batch, "
            "or a whole mask [B, 1, T, T] in the batch",
        )


class _ReplaceAttention(TorchFunctionMode):
    """Inside, calls of ``F.scaled_dot_product_attention`` go to ``attend``, and are counted."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.calls = attend, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self.attend(*args, **(kwargs or {}))


def _shapes(micro: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(entry.shape)}" for name, entry in micro.items())


def _both(mask: Tensor | None, same: Tensor | None) -> Tensor | None:
    if mask is None or same is None:
        return same if mask is None else mask
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, -torch.inf)


def _gather(part: Tensor, group: ProcessGroup) -> Tensor:
    """[..., T/cp, E] of every rank, in the order of the sequence: [..., T, E]."""
    return _Gather.apply(part, group)  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    """All-gather; the backward pass sums the gradients over the ranks and gives each rank its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        count = dist.get_world_size(group)
        parts = part.new_empty((count, *part.shape))
        all_gather_single(parts.flatten(), part.flatten(), group)
        first, second = parts.unflatten(-2, (2, -1)).unbind(-3)  # [cp, ..., r, E]: runs 0 … cp - 1, and 2·cp - 1 … cp
        return torch.cat([first, second.flip(0)]).movedim(0, -3).flatten(-3, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        count = dist.get_world_size(ctx.group)
        runs = gradients[0].unflatten(-2, (2 * count, -1)).movedim(-3, 0)  # [2·cp, ..., r, E]
        parts = torch.cat([runs[:count], runs[count:].flip(0)], -2)  # [cp, ..., T/cp, E]
        gradient = parts.new_empty(parts.shape[1:])
        reduce_scatter_single(gradient.flatten(), parts.flatten(), ctx.group)
        return gradient, None
