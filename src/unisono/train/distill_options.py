"""The section of a configuration that chooses a teacher (knowledge distillation). Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import Problem

# submodule of a student with the layers that project its features
PROJECTIONS: Final = "distill_projections"
_WITH_TEACHER: Final = "distill.teacher"
# above it, differences of the softened probabilities are lost in the rounding of fp32
_MOST_TEMPERATURE: Final = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillOptions:
    """How a model learns from the outputs of a trained one, its teacher (Hinton et al. 2015)."""

    __repr__ = options_repr

    teacher: str = option(
        "",
        "Folder of a run, whose newest checkpoint is the teacher, or of a Hugging Face model; empty = no teacher.",
    )
    teacher_frac: float = option(
        0.5,
        "Weight of the term that compares outputs with the teacher's; the task's own loss has the rest of 1.",
        applies_with=_WITH_TEACHER,
        gt=0.0,
        le=1.0,
    )
    temperature: float = option(
        2.0,
        "Divisor of the logits of both models in that term, which is multiplied by its square; numbers have none.",
        applies_with=_WITH_TEACHER,
        gt=0.0,
        le=_MOST_TEMPERATURE,
    )
    features: tuple[str, ...] = option(
        (),
        "Pairs STUDENT=TEACHER of patterns of module names, whose outputs are compared by mean squared error (Romero et al. "
        "2015); where widths differ, a learned linear layer projects the student's.",
        applies_with=_WITH_TEACHER,
    )
    features_weight: float = option(1.0, "Weight of the features' term.", applies_with="distill.features", gt=0.0)

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Features that are no pairs of patterns, by field name."""
        for pair in self.features:
            mine, equals, its = pair.partition("=")
            if not (equals and mine.strip() and its.strip()):
                yield (
                    "features",
                    Problem(
                        given=f"features {pair!r}",
                        rule="each is a pair STUDENT=TEACHER of patterns of module names",
                        consequence="it is not known which outputs are compared",
                        nearest=f"{pair.strip('= ') or 'blocks.1'}={pair.strip('= ') or 'blocks.1'}",
                    ),
                )

    @property
    def feature_pairs(self) -> tuple[tuple[str, str], ...]:
        """Patterns of the student's and of the teacher's modules."""
        pairs = (pair.partition("=") for pair in self.features)
        return tuple((mine.strip(), its.strip()) for mine, _, its in pairs)
