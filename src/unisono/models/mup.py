"""Maximal update parametrization (muP): how the initial values of a GPT follow from its width. Torch-free.

With it the learning rate that is best for a narrow model is best for a wide one too. The ratio is ``dim / mup_base_dim``;
at a ratio of 1 the model is the one without muP. ``optim.width_scaling`` has the learning rates.

    kind     parameters                                          initial values times
    input    token embedding, gains of norms                     1
    hidden   matrices of the blocks                              ratio^-1/2
    output   output head; the last gain, if the head is tied     ratio^-1

These are the rules of table 3 of the paper, which need no multiplier in the forward pass: a checkpoint and an export have the
usual architecture. A tied head cannot have initial values of its own. There the gain of the last norm, which the head's input
is multiplied by, has the factor 1 / ratio of the paper's table 8.

The paper divides attention scores by the width of a head in place of its root. Here all widths have heads of one width, so the
two differ by a constant, and the root stays.

Source:
    Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466).
"""

from __future__ import annotations

from typing import Final, Literal

from unisono.models.options import ModelOptions

WidthKind = Literal["input", "hidden", "output"]
_INIT_EXPONENTS: Final[dict[WidthKind, float]] = {"input": 0.0, "hidden": -0.5, "output": -1.0}


def width_ratio(options: ModelOptions) -> float:
    """``dim / mup_base_dim``; 1 without muP."""
    return options.dim / options.mup_base_dim if options.mup_base_dim else 1.0


def width_kind(name: str, num_dims: int, *, tied: bool) -> WidthKind:
    """Kind of the parameter ``name`` of a GPT; ``num_dims`` is its number of dims.

    >>> [width_kind(name, 2, tied=False) for name in ("embedding.weight", "blocks.0.ffn.up.weight", "head.weight")]
    ['input', 'hidden', 'output']
    """
    if name == ("norm.weight" if tied else "head.weight"):
        return "output"
    return "hidden" if name.startswith("blocks.") and num_dims > 1 else "input"


def init_scale(kind: WidthKind, ratio: float) -> float:
    """Factor of the initial values of a parameter of this kind."""
    return ratio ** _INIT_EXPONENTS[kind]
