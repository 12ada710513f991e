"""``unisono config``: shows, explains and compares configurations."""

from __future__ import annotations

import os

import click

from unisono.cli.common import every_verb, load_run_config, print_json, takes_config
from unisono.config import diff, explain, load_config, render_origins, schema
from unisono.train.config import RunConfig


@click.group("config")
def command() -> None:
    """Show, explain, compare configurations."""


@command.command("show")
@takes_config
@click.option("--origin", is_flag=True, help="Where each value comes from.")
@every_verb
def show(config: tuple[str, ...], overrides: tuple[str, ...], origin: bool, as_json: bool) -> None:
    """Print the resolved configuration as TOML, or key by key with its origin."""
    resolved = load_run_config(config, overrides)
    if as_json:
        rows = {key: {"value": value, "origin": source} for key, value, source in render_origins(resolved)}
        print_json({"hash": resolved.hash, "values": rows})
    elif origin:
        rows = render_origins(resolved)
        width, value_width = max(len(key) for key, _, _ in rows), max(len(str(value)) for _, value, _ in rows)
        for key, value, source in rows:
            click.echo(f"{key:<{width}}  {value!s:<{value_width}}  {source}")
    else:
        click.echo(resolved.to_toml(), nl=False)


@command.command("explain")
@click.argument("key")
@every_verb
def explain_key(key: str, as_json: bool) -> None:
    """Say what KEY means, its type, range and default, and how to set it."""
    text = explain(RunConfig, key)
    if as_json:
        print_json({"key": key, "text": text})
    else:
        click.echo(text)


@command.command("schema")
@every_verb
def print_schema(as_json: bool) -> None:
    """Print the JSON Schema of a configuration file, for editors that complete TOML."""
    print_json(schema(RunConfig))


@command.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@every_verb
def compare(a: str, b: str, as_json: bool) -> None:
    """Print what differs between two configuration files; exit 1 if anything does."""
    first, second = (load_config(RunConfig, [path], environ=os.environ) for path in (a, b))
    differences = diff(first, second)
    if as_json:
        print_json({"differences": [{"key": d.key, "a": d.left, "b": d.right} for d in differences]})
    for d in () if as_json else differences:
        click.echo(f"{d.key}: {d.left} ({d.left_origin}) -> {d.right} ({d.right_origin})")
    raise SystemExit(1 if differences else 0)
