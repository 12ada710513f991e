"""A search with a narrow model for a wide one: with muP both have the same best learning rate (``models.mup``).

Trials train the model of the configuration at a smaller ``model.dim``, the proxy. The wide model then takes what was found, with
``model.mup_base_dim`` set to the width of the proxy. The coordinate check comes first: it shows with the user's own settings and
data that steps change activations alike at several widths.

Source:
    Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466); tables 1 and 2 say which settings transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unisono.dist.interpreter import module_command
from unisono.doctor.child import run_child
from unisono.errors import ConfigError, Problem
from unisono.report.section import Section, Table
from unisono.report.tables import Figure
from unisono.tune.coordinates import JSON_FILE, CoordinateCheck, read_coordinates
from unisono.tune.folder import exclusive_lock
from unisono.tune.width import settings_of_width

CHECK_FOLDER: Final = "coordinates"  # in the folder of the search
_BASE: Final = "model.mup_base_dim"
_TRANSFERRED: Final = frozenset({"optim.lr", "optim.momentum", "optim.nesterov", "optim.beta1", "optim.beta2"})
_SCHEDULE: Final = "schedule."
_CHECK_LIMIT_S: Final = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WidthTransfer:
    """A narrow model that is searched with, and the wide model that the result is for.

    Attributes:
        proxy: ``WIDTH_SETTINGS`` and ``model.mup_base_dim`` of the narrow model.
        full: The same of the wide model.
        check: The coordinate check; None before it was made.
    """

    proxy: Mapping[str, int]
    full: Mapping[str, int]
    check: CoordinateCheck | None = None

    @property
    def proxy_width(self) -> int:
        """``model.dim`` of the narrow model."""
        return self.proxy["model.dim"]

    @property
    def full_width(self) -> int:
        """``model.dim`` of the wide model."""
        return self.full["model.dim"]

    @property
    def check_widths(self) -> list[int]:
        """Widths of the coordinate check: that of the narrow model, and 2 and 4 times it."""
        return [self.proxy_width << doubling for doubling in range(3)]

    @property
    def holds(self) -> bool:
        """Whether the coordinate check was made and is flat."""
        return self.check is not None and self.check.is_flat

    def proxy_overrides(self) -> list[str]:
        """Settings of the narrow model, as ``--set`` takes them."""
        return [f"{name}={value}" for name, value in self.proxy.items()]

    def identity(self) -> dict[str, int]:
        """What makes a search this one: the widths."""
        return {"proxy_width": self.proxy_width, "full_width": self.full_width}

    def verdict(self) -> str:
        """Which width was searched for which one, in a sentence; or why none was."""
        if self.check is not None and not self.check.is_flat:
            return (
                f"{self.check.verdict()} No trial was started: a learning rate that is right at width {self.proxy_width} "
                f"would not be right at width {self.full_width}."
            )
        return f"Searched at width {self.proxy_width}, for width {self.full_width} with {_BASE}={self.proxy_width}."

    def to_json(self) -> dict[str, Any]:
        """The same as JSON types."""
        return {
            "kind": "mup",
            "proxy_width": self.proxy_width,
            "full_width": self.full_width,
            "proxy": dict(self.proxy),
            "full": dict(self.full),
            "coordinates": None if self.check is None else self.check.to_json(),
        }

    def figures(self) -> list[Figure]:
        """Both widths, for a page."""
        return [Figure("width searched", str(self.proxy_width)), Figure("width of the result", str(self.full_width))]

    def section(self) -> Section:
        """Sizes of both models and slopes of the coordinate check, for a page."""
        sizes = [[name, str(value), str(self.full[name])] for name, value in self.proxy.items()]
        tables = [Table(head=("setting", "searched", "result"), rows=sizes)]
        note = self.verdict()
        if self.check is not None:
            widths = ", ".join(map(str, self.check.widths))
            note += f" The coordinate check of widths {widths} has its curves in {CHECK_FOLDER}/report.html."
            slopes = [[name, f"{slope:.2f}"] for name, slope in self.check.slopes.items()]
            tables.append(Table(head=("activation", "slope of its change"), rows=slopes))
        return Section(title="Transfer of width", note=note, tables=tables)


def chosen_width(settings: Mapping[str, Any], proxy_width: int | None) -> int:
    """Width of the narrow model: that of the command line, else ``model.mup_base_dim``.

    Args:
        settings: Values of the configuration by dotted name.
        proxy_width: ``--proxy-width``; None if it was not given.

    Raises:
        ConfigError: Neither is there, they differ, or the model is not wider.
    """
    base, dim = int(settings[_BASE]), int(settings["model.dim"])
    unit = dim // int(settings["model.num_kv_heads"])  # the width with one key/value head
    fitting = max(1, dim // 4 // unit) * unit
    nearest = (
        f"--proxy-width {fitting}" if fitting < dim else "a model with more key/value heads, which keep their width"
    )
    width = proxy_width or base
    if not width:
        raise ConfigError(
            given=f"--transfer mup without --proxy-width, and {_BASE}=0",
            rule="trials train a narrow model, whose width one of them says",
            consequence="nothing was started",
            nearest=nearest,
        )
    if base and base != width:
        raise ConfigError(
            given=f"--proxy-width {width} with {_BASE}={base}",
            rule="the learning rate of the wide model refers to the width that is searched",
            consequence="it is unclear which of them is meant, and nothing was started",
            nearest=f"leave --proxy-width out, or {_BASE}={width}",
        )
    if width >= dim:
        raise ConfigError(
            given=f"--transfer mup from width {width} to a model of dim {dim}",
            rule="the model that is searched with is narrower than the one that the result is for",
            consequence="nothing was started",
            nearest=nearest,
        )
    return width


def width_transfer(settings: Mapping[str, Any], proxy_width: int) -> WidthTransfer:
    """The transfer to the model of ``settings`` from its ``proxy_width``. Raises ConfigError if there is no such width."""
    proxy = settings_of_width(settings, proxy_width, "--proxy-width")
    full = {name: int(settings[name]) for name in proxy}
    base = {_BASE: proxy_width}
    return WidthTransfer(proxy={**proxy, **base}, full={**full, **base})


def require_transferred(names: Iterable[str]) -> None:
    """Raise ConfigError for settings whose best value at one width is not that of another."""
    problems = [
        Problem(
            given=f"--space {name} with --transfer mup",
            rule="learning rate, schedule and momentum transfer from one width to another: "
            f"{', '.join(sorted(_TRANSFERRED))} and {_SCHEDULE}*",
            consequence="its best value for the narrow model may be another one than for the wide model; nothing was started",
            nearest=f"search the settings that transfer first, then {name} at the full width: "
            f"unisono tune params best.toml --space {name}=…",
        )
        for name in names
        if name not in _TRANSFERRED and not name.startswith(_SCHEDULE)
    ]
    if problems:
        raise ConfigError(*problems)


def check_coordinates(folder: Path, arguments: Sequence[str], transfer: WidthTransfer) -> CoordinateCheck:
    """The coordinate check of a transfer, made by ``unisono tune coord-check`` in a process of its own.

    If the folder has one, of the same search before it was killed or of another process, that one is read.

    Args:
        folder: Where its report is written; the folder above it exists.
        arguments: Files and settings of the configuration, as the command takes them.
        transfer: The widths.

    Raises:
        ConfigError: It failed, or the folder has another one.
        OSError: The folder cannot be written.
    """
    with exclusive_lock(folder.with_name(f".{folder.name}.lock")):  # of processes that share a search, the others wait
        if not (folder / JSON_FILE).exists():
            widths = ",".join(map(str, transfer.check_widths))
            chosen = [f"--set={_BASE}={transfer.proxy_width}", f"--widths={widths}", f"--out={folder}"]
            command = module_command("unisono", "tune", "coord-check", *arguments, *chosen)
            outcome = run_child(folder, command, timeout_s=_CHECK_LIMIT_S)
            if not (folder / JSON_FILE).exists():
                raise ConfigError(
                    given=f"the coordinate check of widths {widths}: {outcome.trouble or 'it wrote no report'}",
                    rule="before a search, a few steps at each width show whether muP holds for this configuration",
                    consequence="no training was started",
                    nearest="a smaller --proxy-width or plan.micro_batch if memory is short: it trains in one process",
                )
        found = read_coordinates(folder)
    if (found.base_dim, list(found.widths)) != (transfer.proxy_width, transfer.check_widths):
        raise ConfigError(
            given=f"{folder}, a coordinate check of other widths",
            rule="a search has its own, made before its first trial",
            consequence="no training was started",
            nearest="another folder (--out)",
        )
    return found
