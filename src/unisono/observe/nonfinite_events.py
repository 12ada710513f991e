"""Reads ``nonfinite`` events, and puts what they say into words. Their content is not trusted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from unisono.observe.events import Event, as_mapping, event_step


@dataclass(frozen=True, kw_only=True, slots=True)
class NonfiniteOrigin:
    """The first non-finite tensor of a skipped step, on one rank.

    Attributes:
        step: Number of the step, from 1.
        where: ``input``, ``parameter``, ``forward``, ``loss`` or ``backward``.
        layer: Name of the module; empty for the root module, and outside of all modules.
        operator: The operator that made it; empty where it is not known.
        tensor: Name of the entry of the batch or of the parameter; empty for a result.
        value: ``nan`` or ``inf``.
        input_value: The worst value among the operator's inputs: ``finite`` or ``inf``; empty where it is not known.
        sample_ids: The first samples in whose rows it is not finite.
    """

    step: int
    where: str
    layer: str
    operator: str
    tensor: str
    value: str
    input_value: str
    sample_ids: tuple[int, ...]

    @property
    def place(self) -> str:
        """The place of the tensor, in words."""
        if self.tensor:
            return f"batch entry {self.tensor!r}" if self.where == "input" else f"{self.where} {self.tensor}"
        result = f"the result of {self.operator}" if self.operator else "a result"
        if self.where == "forward" and not self.layer:
            return f"{result} in the model's own forward pass"  # of the root module, which has no name
        place = f" in {self.layer}" if self.layer else ""
        return f"{result}{place}, {_PHASES.get(self.where, self.where)}"


_PHASES = {"forward": "forward pass", "backward": "backward pass", "loss": "loss function"}


def read_origins(events: Iterable[Event]) -> tuple[NonfiniteOrigin, ...]:
    """The origins that this rank has found."""
    return tuple(origin for event in events if (origin := origin_of(event)) is not None)


def origin_of(event: Event) -> NonfiniteOrigin | None:
    """The origin that an event reports; None for another event, and where the search found none."""
    step = event_step(event)
    if event.get("kind") != "nonfinite" or step is None or event.get("reproduced") is not True:
        return None
    samples = event.get("samples")
    ids = cast("list[Any]", samples) if isinstance(samples, list) else []
    fields = as_mapping(event)
    names = ("where", "layer", "operator", "tensor", "value", "input_value")
    texts = {name: _text(fields.get(name)) for name in names}
    return NonfiniteOrigin(step=step, **texts, sample_ids=tuple(one for one in ids if isinstance(one, int)))


def _text(value: Any) -> str:
    return value[:500] if isinstance(value, str) else ""
