"""Context parallelism for models from transformers, through its registries of attention and mask functions.

transformers makes masks once, before the blocks, for the tokens it is given. A rank's tokens alone would give wrong masks, and
the jump in their positions would look like the border between packed samples. So these models get the global
``attention_mask`` [B, T], and their mask functions are evaluated here for this rank's positions and all keys. Plain causal and
plain full attention need no mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import PlanError

_NAME = "unisono_context"


def models_of_transformers(model: nn.Module) -> list[Any]:
    """The ``PreTrainedModel``s in ``model``, itself included, outermost first."""
    library: Any = sys.modules.get("transformers")  # not imported: no model of it is here
    return [] if library is None else [m for m in model.modules() if isinstance(m, library.PreTrainedModel)]


class TransformersModels:
    """The ``PreTrainedModel``s inside ``model``; without any, all methods do nothing.

    Raises PlanError for one that does not compute attention with torch's function.
    """

    def __init__(self, model: nn.Module) -> None:
        self._models = models_of_transformers(model)
        for inner in self._models:
            chosen = inner.config._attn_implementation
            if chosen not in ("sdpa", _NAME):
                raise PlanError(
                    given=f"plan.cp above 1 for {type(inner).__name__} with attention {chosen!r}",
                    rule="the ranks of a sequence join their parts in torch's scaled_dot_product_attention",
                    consequence="each token would see a part of its sequence only",
                    nearest="model.set_attn_implementation('sdpa')",
                )
        decodes = any(getattr(module, "is_causal", False) for inner in self._models for module in inner.modules())
        # what transformers does: positions that jump begin another document, but only without a cache
        self._packs = decodes and not any(getattr(inner.config, "use_cache", False) for inner in self._models)

    def install(self) -> None:
        """Register the attention and mask functions, and let the models use them."""
        if not self._models:
            return
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(_NAME, sdpa_attention_forward)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        for model in self._models:
            model.set_attn_implementation(_NAME)

    def complete(self, part: dict[str, Tensor], micro: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
        """``part`` with the whole ``attention_mask`` [B, T], of ones where there is none. Raises PlanError for labels that the
        model would shift."""
        if not self._models:
            return part
        if "labels" in micro and any(model.loss_function.__name__ == "ForCausalLMLoss" for model in self._models):
            raise PlanError(
                given=f"labels for {type(self._models[0]).__name__} with sequences cut over ranks",
                rule="a model that shifts labels by one needs the token after each of its own, which another rank has",
                consequence="labels at the ends of runs would be wrong",
                nearest="shifted targets under another name, such as 'targets', for the objective",
            )
        if "attention_mask" in micro:
            return part | {"attention_mask": micro["attention_mask"]}
        first = next(iter(part.values()))
        return part | {"attention_mask": torch.ones(len(first), length, dtype=torch.bool, device=first.device)}

    def documents(self, micro: Mapping[str, Tensor]) -> Tensor | None:
        """[B, T] numbers of the documents that transformers would read from ``position_ids``; None where it would not."""
        positions = micro.get("position_ids")
        if positions is None or "attention_mask" in micro or not self._packs:
            return None
        starts = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
        return starts.cumsum(1)

    @contextmanager
    def masks(self, order: Tensor, padding: Tensor | None, length: int) -> Generator[None]:
        """Inside, masks are of queries at the places ``order`` [T/cp] and of all T keys that ``padding`` [B, T] counts."""
        if not self._models:
            yield
            return
        from transformers import AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionMaskInterface.register(_NAME, _masks(order, padding, length))
        try:
            yield
        finally:
            AttentionMaskInterface.register(_NAME, sdpa_mask)


def _masks(order: Tensor, padding: Tensor | None, length: int) -> Callable[..., Tensor | None]:
    from transformers import masking_utils as masking

    padded = padding is not None and not bool(padding.all())  # waits for the device, as transformers does

    def mask(
        *, batch_size: int, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any
    ) -> Tensor | None:
        """Bool, true where a query may look: [B, 1, T/cp, T], or [B, 1, 1, T] where all may see the same keys."""
        plain = mask_function in (masking.causal_mask_function, masking.bidirectional_mask_function)
        if (plain or (local_size is not None and local_size > length)) and not padded:
            return None
        if _holds_a_sequence(mask_function):
            raise PlanError(
                given="an attention mask that is made of the tokens of a sequence, under plan.cp above 1",
                rule="masks are functions of places, of documents (position_ids) and of padding (attention_mask)",
                consequence="the model made this one of its part of the sequence, which says nothing of other keys",
                nearest="a model without it, or plan.cp=1",
            )
        if padded:
            assert padding is not None
            mask_function = masking.and_masks(mask_function, masking.padding_mask_function(padding.bool()))
        batch, keys = (torch.arange(size, device=order.device) for size in (batch_size, length))
        head = torch.zeros(1, dtype=torch.int64, device=order.device)
        return mask_function(
            batch[:, None, None, None], head[:, None, None], order[:, None], keys
        )  # broadcast over [B, 1, T/cp, T]

    return mask


def _holds_a_sequence(function: Any) -> bool:
    """Whether a mask function keeps a tensor of two dims or more, or others that do."""
    for cell in getattr(function, "__closure__", None) or ():
        inner = cell.cell_contents
        for value in inner if isinstance(inner, tuple) else (inner,):
            if (isinstance(value, Tensor) and value.dim() > 1) or (callable(value) and _holds_a_sequence(value)):
                return True
    return False
