"""``unisono config``: shows, explains and compares configurations."""

from __future__ import annotations

import click

from unisono.cli.common import ExpandedPath, common_options, load_run_config, print_json, print_result, takes_config
from unisono.config import diff, explain, render_origins, schema
from unisono.train.config import RunConfig


@click.group("config")
def command() -> None:
    """Show, explain, compare configurations."""


@command.command("show")
@takes_config
@click.option("--origin", is_flag=True, help="Where each value comes from.")
@common_options
def show(config: tuple[str, ...], overrides: tuple[str, ...], origin: bool, as_json: bool) -> None:
    """Print the resolved configuration as TOML, or key by key with its origin."""
    resolved = load_run_config(config, overrides, is_shown=True)
    rows = render_origins(resolved)
    width, value_width = max(len(key) for key, _, _ in rows), max(len(value) for _, value, _ in rows)
    lines = [f"{key:<{width}}  {value:<{value_width}}  {source}" for key, value, source in rows]
    values = {key: {"value": value, "origin": source} for key, value, source in rows}
    print_result(
        as_json, {"hash": resolved.hash, "values": values}, lines if origin else resolved.to_toml().rstrip("\n")
    )


@command.command("explain")
@click.argument("key")
@common_options
def explain_key(key: str, as_json: bool) -> None:
    """Say what KEY means, its type, range and default, and how to set it."""
    text = explain(RunConfig, key)
    print_result(as_json, {"key": key, "text": text}, text)


@command.command("schema")
@common_options
def print_schema(as_json: bool) -> None:
    """Print the JSON Schema of a configuration file, for editors that complete TOML."""
    print_json(schema(RunConfig))


@command.command("diff")
@click.argument("a", type=ExpandedPath())
@click.argument("b", type=ExpandedPath())
@common_options
def compare(a: str, b: str, as_json: bool) -> None:
    """Print what differs between two configuration files; exit 1 if anything does."""
    first, second = (load_run_config([path], (), is_shown=True) for path in (a, b))
    differences = diff(first, second)
    rows = [{"key": d.key, "a": d.left, "b": d.right} for d in differences]
    lines = [f"{d.key}: {d.left} ({d.left_origin}) -> {d.right} ({d.right_origin})" for d in differences]
    print_result(as_json, {"differences": rows}, lines)
    raise SystemExit(1 if differences else 0)
