"""Which layers of a model stay as they are when it is quantized or pruned: patterns of names. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

# the layers next to the inputs and the outputs, by their names in the built-in models and in those of transformers
OUTER_LAYERS: Final = (
    *("stem", "project", "head", "head.classifier"),
    *("lm_head*", "classifier*", "score", "cls.predictions.decoder", "vocab_projector", "embed_out"),
)


def matching_layers(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match one of the patterns of ``--skip``, in which ``*`` also stands for dots (``fnmatchcase``)."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
