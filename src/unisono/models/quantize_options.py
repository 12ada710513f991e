"""Settings of quantized layers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import Problem, inert_problem
from unisono.models.layer_patterns import OUTER_LAYERS

Scheme = Literal["none", "int8", "int8_dynamic", "int8_static", "int4"]
Backend = Literal["torch", "torchao"]
_QUANTIZED: Final = "quantize.scheme other than none"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeOptions:
    """Section ``quantize`` of a configuration: layers whose weights have few bits."""

    __repr__ = options_repr

    scheme: Scheme = option(
        "none",
        "int8 = weights, a scale per row; int8_dynamic = also activations, a scale per token; int8_static = activations with "
        "calibrated scales; int4 = weights, a scale per group; none = floating point.",
    )
    group_size: int = option(
        32,
        "Weights of a row that share a scale, a multiple of 8; divides the inputs of each layer.",
        applies_with="quantize.scheme int4",
        ge=8,
    )
    skip: tuple[str, ...] = option(
        OUTER_LAYERS,
        "Layers that stay in floating point: patterns of names; by default those next to inputs and outputs.",
        applies_with=_QUANTIZED,
    )
    aware: bool = option(
        False,
        "Quantization-aware training: layers compute with rounded numbers, and train the weights behind them.",
        applies_with="quantize.scheme int8, int8_dynamic or int4",
    )

    backend: Backend = option(
        "torch",
        "What multiplies in linear layers that are stored: operations of torch, or the tensor classes of the package torchao. "
        "Files and rounded weights are the same.",
        applies_with="quantize.scheme other than none, without quantize.aware",
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Problems between two fields, by field name."""
        unset = QuantizeOptions()
        acts = {"group_size": self.scheme == "int4", "skip": self.scheme != "none", "aware": self.scheme != "none"}
        for name, is_read in acts.items():
            value = getattr(self, name)
            if not is_read and value != getattr(unset, name):
                given = f"{name} {value!r} with scheme {self.scheme!r}"
                yield name, inert_problem(given, "nothing reads it there", f"leave {name} out")
        if self.scheme == "int4" and self.group_size % 8:
            yield (
                "group_size",
                Problem(
                    given=f"group_size {self.group_size}",
                    rule="files hold weights of four bits eight at a time, so a group is a multiple of 8",
                    consequence="a group would end inside a word",
                    nearest=f"group_size={max(8, round(self.group_size / 8) * 8)}",
                ),
            )
        if self.backend != unset.backend and (self.scheme == "none" or self.aware):
            where = "aware" if self.aware else f"scheme {self.scheme!r}"
            given, why = f"backend {self.backend!r} with {where}", "it multiplies in layers whose weights are stored"
            yield "backend", inert_problem(given, why, "leave backend out")
        if self.aware and self.scheme == "int8_static":
            yield (
                "aware",
                Problem(
                    given="aware with scheme 'int8_static'",
                    rule="scales of activations are calibrated with a trained model",
                    consequence="there are none while the weights still change",
                    nearest="scheme='int8_dynamic', whose scales are those of each token",
                ),
            )
