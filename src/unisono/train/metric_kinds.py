"""What built-in metrics and objectives take as targets, classes or numbers, and which metrics are to be large, by name.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unisono.errors import Problem

CLASSES, NUMBERS = "classes", "numbers"
_OF_CLASSES = ("perplexity", "accuracy", "token_accuracy", "f1", "mcc", "auc", "confusion")
_OF_NUMBERS = ("mae", "rmse", "r2", "spearman")
_LARGE = ("accuracy", "token_accuracy", "f1", "mcc", "auc", "r2", "spearman")
_SMALL = ("loss", "perplexity", "bits_per_byte", "mae", "rmse")
_OBJECTIVES = {
    **dict.fromkeys(("next_token", "masked_token", "cross_entropy", "CrossEntropyLoss", "NLLLoss"), CLASSES),
    **dict.fromkeys(("mean_squared_error", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"), NUMBERS),
}


def metric_kind(name: str) -> str:
    """``classes`` or ``numbers``; empty for a metric of both, and for one that is not built in."""
    kind = name.partition(":")[0]
    if kind in _OF_CLASSES or (kind.startswith("top") and kind[3:].isdigit()):
        return CLASSES
    return NUMBERS if kind in _OF_NUMBERS else ""


def larger_is_better(name: str) -> bool | None:
    """Whether a metric of this name, such as ``eval/accuracy`` or ``f1:10``, is to be large; None if it is not built in."""
    kinds = [part.partition(":")[0] for part in name.split("/")]
    if any(kind in _LARGE or (kind.startswith("top") and kind[3:].isdigit()) for kind in kinds):
        return True
    return False if any(kind in _SMALL for kind in kinds) else None


def objective_kind(name: str) -> str:
    """``classes`` or ``numbers``, of a built-in objective or a loss of torch.nn; empty for others."""
    return _OBJECTIVES.get(name, "")


def metric_classes(name: str) -> int:
    """Number of classes that a metric counts; 0 if it takes any."""
    kind, _, classes = name.partition(":")
    if kind not in ("f1", "mcc", "auc", "confusion"):
        return 0
    return int(classes) if classes.isdigit() else 2


def kind_problems(names: Iterable[str], kind: str, beside: str) -> Iterator[Problem]:
    """A problem for each metric that does not take targets of this kind; ``beside`` says what makes them so."""
    for name in names:
        takes = metric_kind(name)
        if kind and takes and takes != kind:
            yield Problem(
                given=f"the metric {name!r} with {beside}",
                rule=f"{name} compares {takes}, and the targets are {kind}",
                consequence="its value would mean nothing, and nothing was started",
                nearest="mae, rmse, r2 or spearman:<low>:<high>"
                if kind == NUMBERS
                else "accuracy, f1:<classes> or another metric of classes",
            )
