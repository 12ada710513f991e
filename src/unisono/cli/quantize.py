"""``unisono quantize``: a smaller model with weights of 8 or 4 bits. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, get_args

import click

from unisono.cli.common import FiniteRange, common_options
from unisono.cli.compression import Compressed, calibration_source, compress, takes_source
from unisono.config import Resolved
from unisono.errors import ConfigError
from unisono.models.quantize_options import Backend, QuantizeOptions, Scheme
from unisono.train.config import RunConfig

if TYPE_CHECKING:
    from unisono.train.trained import TrainedRun

SCHEMES: dict[Scheme, str] = {
    "int8": "int8 weights",
    "int8_dynamic": "int8 weights, int8 activations with a scale per token",
    "int8_static": "int8 weights, int8 activations with calibrated scales",
    "int4": "int4 weights",
}
_CALIBRATION_SAMPLES = 128


@click.command("quantize")
@takes_source
@click.option(
    "--scheme",
    type=click.Choice(list(SCHEMES)),
    help="What is quantized; by default int8, or the scheme of quantization-aware training.",
)
@click.option("--group-size", type=click.IntRange(min=8), help="int4: weights that share a scale; by default 32.")
@click.option(
    "--skip",
    multiple=True,
    metavar="PATTERN",
    help="More layers to leave unquantized (the first and last always are).",
)
@click.option(
    "--backend",
    type=click.Choice(get_args(Backend)),
    default="torch",
    show_default=True,
    help="What multiplies in the linear layers; torchao is a package of its own. The files are the same.",
)
@click.option(
    "--calibration-samples",
    type=click.IntRange(min=1),
    help="int8_static: training samples that calibrate the scales of activations; of a Python script's run they are from --data. "
    f"By default {_CALIBRATION_SAMPLES}.",
)
@click.option(
    "--percentile",
    type=FiniteRange(min=50, max=100),
    help="int8_static: percent of a layer's inputs that its scale spans; by default 100.",
)
@click.option(
    "--sensitivity", is_flag=True, help="Also evaluate with each layer quantized alone: which of them cost most."
)
@common_options
def command(
    scheme: Scheme | None,
    group_size: int | None,
    skip: tuple[str, ...],
    backend: Backend,
    calibration_samples: int | None,
    percentile: float | None,
    sensitivity: bool,
    **given: Any,
) -> int:
    """Write SOURCE with weights of 8 or 4 bits, and what it costs, into a new folder.

    SOURCE is the folder of a run, or a Hugging Face folder with the data that judge it (--set data.train=…).
    """

    def change(run: TrainedRun, resolved: Resolved[RunConfig]) -> Compressed:
        from unisono.compress.quantize import Calibration, quantize_model, sensitivities
        from unisono.models.quantized_model import stored_layers
        from unisono.models.quantized_torchao import torchao_row

        options = replace(_options(resolved.value.quantize, scheme, group_size, skip), backend=backend)
        _check_options(options, group_size, calibration_samples, percentile)
        if sensitivity and resolved.value.quantize.aware:
            raise ConfigError(
                given="--sensitivity with a run that was trained with rounded numbers",
                rule="it compares each layer with the model in floating point",
                consequence="all layers are rounded already, and no difference would be seen",
                nearest="leave --sensitivity out",
            )
        calibration = Calibration(samples=calibration_samples or _CALIBRATION_SAMPLES, percentile=percentile or 100.0)
        made = quantize_model(run, options, calibration)
        record: dict[str, Any] = {"scheme": options.scheme, **made.facts()}
        what = SCHEMES[options.scheme]
        if options.scheme == "int4":
            what, record["group_size"] = f"{what} in groups of {options.group_size}", options.group_size
        if options.scheme == "int8_static":
            record["calibration"] = {**asdict(calibration), "source": calibration_source(run)}
        lines = list(made.rows())
        if backend == "torchao":
            what, record["backend"] = f"{what}, computed by torchao", backend
            lines.append(torchao_row(stored_layers(made.model), run.device))
        if options.scheme == "int8_static":
            lines.append(f"scales of activations: from {calibration_source(run)}")
        if sensitivity:
            found = sensitivities(run, options, made, given["samples"])
            record["sensitivity"] = [asdict(each) for each in found]
            lines += [f"{'one layer quantized alone':<44}{'loss':>10}{'change':>11}"]
            lines += [f"{each.layer:<44}{each.loss:>10.4f}{each.change:>+11.5f}" for each in found]
        config = replace(resolved.value, quantize=options)
        keys = [f"quantize.{name}" for name in options.__dataclass_fields__]
        updated = resolved.updated(config, keys, "unisono quantize")
        return Compressed(model=made.model, resolved=updated, what=what, record=record, lines=lines)

    return compress(change, **given)


def _options(
    of_run: QuantizeOptions, scheme: Scheme | None, group_size: int | None, skip: tuple[str, ...]
) -> QuantizeOptions:
    """The options of the stored model. Raises ConfigError for a run that has another scheme, or stored layers already."""
    if of_run.scheme == "none":
        chosen = QuantizeOptions(scheme=scheme or "int8", skip=(*of_run.skip, *skip))
        return chosen if group_size is None else replace(chosen, group_size=group_size)
    if not of_run.aware:
        raise ConfigError(
            given=f"a source that has {SCHEMES[of_run.scheme]} already",
            rule="a quantized model cannot be quantized again",
            consequence="nothing was quantized",
            nearest="the run that it was made from",
        )
    for name, value, trained in (
        ("--scheme", scheme, of_run.scheme),
        ("--group-size", group_size, of_run.group_size),
        ("--skip", skip or None, of_run.skip),
    ):
        if value not in (None, trained):
            raise ConfigError(
                given=f"{name} {value if isinstance(value, str | int) else ' '.join(value or ())} for a run that was trained "
                f"with {name.removeprefix('--').replace('-', '_')} {trained!r}",
                rule="the weights were trained for this rounding",
                consequence="another one would lose what the training gained; nothing was quantized",
                nearest=f"leave {name} out",
            )
    return replace(of_run, aware=False)


def _check_options(
    options: QuantizeOptions, group_size: int | None, calibration_samples: int | None, percentile: float | None
) -> None:
    """Raise ConfigError for an option that the scheme does not read."""
    for name, value, reader in (
        ("--group-size", group_size, "int4"),
        ("--calibration-samples", calibration_samples, "int8_static"),
        ("--percentile", percentile, "int8_static"),
    ):
        if value is not None and options.scheme != reader:
            raise ConfigError(
                given=f"{name} {value} with --scheme {options.scheme}",
                rule=f"it is an option of --scheme {reader}",
                consequence="it would change nothing; nothing was quantized",
                nearest=f"--scheme {reader}, or leave {name} out",
            )
    for _, problem in options.problems():
        raise ConfigError(problem)
