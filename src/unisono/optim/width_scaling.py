"""Learning rates and weight decay by width, in the maximal update parametrization (muP). Torch-free.

``models.mup`` has the kinds of parameters and the ratio of widths. The learning rate of a group is ``optim.lr`` times

    kind     adam, adamw    sgd
    input    1              ratio
    hidden   ratio^-1       1
    output   ratio^-1       ratio^-1

so that one step changes each activation by an amount that does not depend on the width. An update of LAMB or LARS is in
proportion to the norm of its parameter, for which the paper has no rule.

The weight decay of a group is divided by the same factor: a step shrinks weights by ``lr · weight_decay``, and that product
stays the one of the base width. Adam's decay is part of the gradient that Adam normalises, so no factor keeps its effect.

Source:
    Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466), table 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from unisono.errors import Problem
from unisono.optim.options import OptimOptions

_ADAM: Final[dict[str, float]] = {"input": 0.0, "hidden": -1.0, "output": -1.0}
_LR_EXPONENTS: Final[dict[str, dict[str, float]]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "sgd": {"input": 1.0, "hidden": 0.0, "output": -1.0},
}


def lr_scales(kinds: Mapping[str, str], ratio: float, optimizer: str) -> dict[str, float]:
    """Factor of the learning rate of each parameter, by name.

    Args:
        kinds: ``input``, ``hidden`` or ``output`` by name.
        ratio: Width of the model divided by the base width.
        optimizer: ``adam``, ``adamw`` or ``sgd``.

    >>> lr_scales({"embedding": "input", "up": "hidden"}, 4.0, "adamw")
    {'embedding': 1.0, 'up': 0.25}
    """
    exponents = _LR_EXPONENTS[optimizer]
    return {name: ratio ** exponents[kind] for name, kind in kinds.items()}


def width_problems(options: OptimOptions) -> Iterator[tuple[str, Problem]]:
    """Settings whose effect does not transfer from one width to another, by field name."""
    if options.kind not in _LR_EXPONENTS:
        yield (
            "kind",
            Problem(
                given=f"optim.kind {options.kind!r} with model.mup_base_dim",
                rule="a step of lamb or lars is in proportion to the norm of its layer, for which muP has no rule",
                consequence="the learning rate would not transfer from one width to another",
                nearest="optim.kind=adamw, adam or sgd, or leave model.mup_base_dim out",
            ),
        )
    decays = [options.effective_weight_decay, *(group.get("weight_decay", 0.0) for group in options.groups)]
    if options.kind == "adam" and any(decays):
        yield (
            "weight_decay",
            Problem(
                given="a weight decay of adam with model.mup_base_dim",
                rule="adam adds the decay to the gradient, whose size depends on the width, and normalises the sum",
                consequence="the decay would act differently at each width",
                nearest="optim.kind=adamw, whose decay is apart from the gradient, or optim.weight_decay=0",
            ),
        )
    if options.kind == "sgd" and options.clip_norm:
        yield (
            "clip_norm",
            Problem(
                given=f"optim.clip_norm {options.clip_norm:g} of sgd with model.mup_base_dim",
                rule="the global gradient norm grows with the width, and a step of sgd is in proportion to the clipped gradient",
                consequence="wide models would be clipped at other steps than narrow ones",
                nearest="optim.clip_norm=0, or optim.kind=adamw",
            ),
        )
