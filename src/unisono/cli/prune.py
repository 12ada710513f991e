"""``unisono prune``: a smaller model from a trained one, without some of its heads, hidden units and layers, or with zeros."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unisono.cli.common import FiniteRange, common_options
from unisono.cli.compression import Compressed, calibration_source, compress, takes_source
from unisono.config import Resolved
from unisono.errors import ConfigError
from unisono.train.config import RunConfig

if TYPE_CHECKING:
    from unisono.compress.scores import Criterion
    from unisono.compress.sparse import Pattern
    from unisono.train.trained import TrainedRun

_CALIBRATION_SAMPLES = 128

_FRACTION = FiniteRange(min=0, max=1, max_open=True)


@click.command("prune")
@takes_source
@click.option("--heads", metavar="FRAC", type=_FRACTION, default=0.0, help="Remove this fraction of the query heads.")
@click.option(
    "--ffn",
    metavar="FRAC",
    type=_FRACTION,
    default=0.0,
    help="Remove this fraction of the hidden units of feed-forward layers and experts, or of the channels inside a bottleneck.",
)
@click.option("--layers", metavar="N", type=click.IntRange(min=0), default=0, help="Remove N blocks.")
@click.option(
    "--sparsity",
    metavar="FRAC",
    type=_FRACTION,
    help="Set this fraction of the weights to 0; shapes and the size on disk stay.",
)
@click.option(
    "--pattern",
    type=click.Choice(["unstructured", "2:4"]),
    default="unstructured",
    show_default=True,
    help="Which weights may be 0; 2:4 are two of each four in a row.",
)
@click.option(
    "--criterion",
    type=click.Choice(["magnitude", "activation", "taylor"]),
    default="activation",
    show_default=True,
    help="What tells the least important: weights, weights times activations, or the first-order change of the loss.",
)
@click.option(
    "--calibration-samples",
    type=click.IntRange(min=1),
    help="Training samples for activations and gradients; by default 128. Of a Python script's run they are from --data.",
)
@click.option(
    "--skip",
    metavar="PATTERN",
    multiple=True,
    help="Names of layers and blocks that --sparsity and --layers leave; * also stands for dots.",
)
@click.option(
    "--sensitivity",
    is_flag=True,
    help="Show the held-out loss when only one block is pruned. It is shown, and chooses nothing; --criterion does.",
)
@common_options
def command(
    heads: float,
    ffn: float,
    layers: int,
    sparsity: float | None,
    pattern: Pattern,
    criterion: Criterion,
    calibration_samples: int | None,
    skip: tuple[str, ...],
    sensitivity: bool,
    as_json: bool,
    **source: Any,
) -> int:
    """Prune the model of SOURCE, a run's folder or a Hugging Face folder, into the new folder --out.

    Heads, hidden units and layers are really removed: the result is a model of the same class with smaller sizes. Fine-tune it
    with unisono train OUT/config.toml --set run.dir=NEW.
    """
    fraction = 0.5 if sparsity is None and pattern == "2:4" else sparsity or 0.0
    _check(heads, ffn, layers, fraction, pattern, sensitivity=sensitivity)
    if criterion == "magnitude" and calibration_samples is not None:
        raise ConfigError(
            given=f"--calibration-samples {calibration_samples} with --criterion magnitude",
            rule="magnitude compares weights, and reads no samples",
            consequence="it would change nothing; nothing was pruned",
            nearest="--criterion activation or taylor, or leave --calibration-samples out",
        )
    samples = calibration_samples or _CALIBRATION_SAMPLES

    def change(run: TrainedRun, resolved: Resolved[RunConfig]) -> Compressed:
        from unisono.compress.pruning import prune
        from unisono.compress.smaller import Removal
        from unisono.compress.sparse import Sparsity

        common: Any = {"criterion": criterion, "samples": samples, "skip": skip}
        pruned = prune(
            run,
            resolved,
            removal=Removal(heads=heads, ffn=ffn, layers=layers, **common),
            sparsity=Sparsity(fraction=fraction, pattern=pattern, **common) if fraction else None,
            sensitivity_samples=source["samples"] if sensitivity else None,
            out=Path(source["out"]),
        )
        if criterion != "magnitude":
            pruned.record["calibration"] = {"samples": samples, "source": calibration_source(run)}
            pruned.lines.append(f"what matters least: by {criterion} on {calibration_source(run)}")
        return Compressed(
            model=pruned.model,
            resolved=pruned.resolved,
            what=pruned.what,
            record=pruned.record,
            lines=pruned.lines,
        )

    return compress(change, as_json=as_json, **source)


def _check(heads: float, ffn: float, layers: int, fraction: float, pattern: str, *, sensitivity: bool) -> None:
    """Refuse options that would change nothing or contradict each other."""
    if not (heads or ffn or layers or fraction):
        raise ConfigError(
            given="nothing to prune",
            rule="--heads, --ffn and --layers remove parts; --sparsity sets weights to 0",
            consequence="nothing was pruned",
            nearest="--ffn 0.25",
        )
    if pattern == "2:4" and fraction != 0.5:
        raise ConfigError(
            given=f"--sparsity {fraction:g} with --pattern 2:4",
            rule="two of each four weights are 0",
            consequence="nothing was pruned",
            nearest="--pattern 2:4 alone",
        )
    if sensitivity and not (heads or ffn or layers):
        raise ConfigError(
            given="--sensitivity without --heads, --ffn or --layers",
            rule="it shows what their removal from one block alone would cost",
            consequence="nothing was pruned",
            nearest="--ffn 0.25 --sensitivity",
        )
