"""Options ``--transfer`` and ``--proxy-width`` of ``unisono tune``: trials with a narrow model, for a wide one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from unisono.cli.common import load_run_config, train_arguments
from unisono.cli.terminal import echo
from unisono.cli.termination import sigterm_interrupts
from unisono.errors import ConfigError

if TYPE_CHECKING:
    from unisono.train.config import RunConfig
    from unisono.tune.transfer import WidthTransfer

F = TypeVar("F", bound=Callable[..., Any])


def transfer_options(function: F) -> F:
    """Decorator that adds ``--transfer`` and ``--proxy-width``; ``read_transfer`` reads them."""
    function = click.option(
        "--proxy-width",
        type=click.IntRange(min=1),
        help="model.dim of the narrow model of --transfer (default: model.mup_base_dim).",
    )(function)
    return click.option(
        "--transfer",
        type=click.Choice(("mup",)),
        help="Train a narrow model; the result is for the wide one of CONFIG, by the maximal update parametrization.",
    )(function)


def read_transfer(
    files: Sequence[str], overrides: Sequence[str], kind: str | None, proxy_width: int | None, run_dir: Path
) -> WidthTransfer | None:
    """The transfer that the options ask for; None without ``--transfer``.

    Args:
        files: Files of the configuration.
        overrides: Settings of the command line.
        kind: ``--transfer``.
        proxy_width: ``--proxy-width``.
        run_dir: A folder without a run.

    Raises:
        ConfigError: muP does not cover the configuration, or there is no such narrow model.
    """
    from unisono.tune.transfer import chosen_width, width_transfer

    if kind is None:
        if proxy_width is not None:
            raise ConfigError(
                given=f"--proxy-width {proxy_width} without --transfer",
                rule="a narrow model is searched with if the result transfers to the wide one",
                consequence="nothing was started",
                nearest=f"--transfer mup --proxy-width {proxy_width}",
            )
        return None
    place = f"run.dir={run_dir}"
    given = load_run_config(files, [*overrides, place], is_shown=True)
    _require_gpt(given.value)
    width = chosen_width(given.encoded, proxy_width)
    width_transfer(given.encoded, width)  # before the wide model has a setting that the user did not give
    wide = load_run_config(files, [*overrides, place, f"model.mup_base_dim={width}"], is_shown=True)
    return width_transfer(wide.encoded, width)


def _require_gpt(config: RunConfig) -> None:
    """Raise ConfigError for a built-in model that muP does not cover."""
    from unisono.tasks.model_names import MODELS, default_model
    from unisono.train.config import AUTO

    model = config.components.model
    name = default_model(config.task.kind) if model == AUTO else model
    name = config.model.pretrained or name
    if name != "gpt" and (config.model.pretrained or (isinstance(name, str) and name in MODELS)):
        raise ConfigError(
            given=f"--transfer mup with the model {name}",
            rule="muP is for the model gpt, whose parts have known factors by width",
            consequence="nothing was started",
            nearest="without --transfer the settings are searched at the width of the model itself",
        )


def with_check(
    transfer: WidthTransfer, out: Path, files: Sequence[str], overrides: Sequence[str], *, as_json: bool
) -> WidthTransfer:
    """The transfer with its coordinate check, which is made unless the folder of the search has it.

    Args:
        transfer: The widths.
        out: The folder of the search.
        files: Files of the configuration.
        overrides: Settings of the command line.
        as_json: Whether no lines are printed.

    Raises:
        ConfigError: The check could not be made.
    """
    from unisono.tune.transfer import CHECK_FOLDER, check_coordinates

    if not as_json:
        echo(f"coordinate check at widths {', '.join(map(str, transfer.check_widths))}")
    with sigterm_interrupts():
        found = check_coordinates(out.absolute() / CHECK_FOLDER, train_arguments(files, overrides), transfer)
    if not as_json:
        echo(found.verdict())
    return replace(transfer, check=found)
