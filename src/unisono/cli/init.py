"""``unisono init``: a starter configuration to edit."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from unisono.cli.common import ExpandedPath, common_options, print_result
from unisono.config import starter
from unisono.errors import ConfigError
from unisono.storage.files import open_new
from unisono.tasks.starters import TASKS, task_starter
from unisono.train.config import RunConfig

PYTHON_TEMPLATE = '''\
"""Your own model under unisono: `unisono train {name}`."""

import torch
from unisono import Components, RunConfig


class Bigram(torch.nn.Embedding):  # any torch.nn.Module; forward's parameters name entries of the batch
    def forward(self, tokens):
        return super().forward(tokens)  # logits [batch, time, 257], one row of the table per last byte


def objective(outputs, batch):  # -> (sum of losses, sum of weights) of a micro-batch; unisono divides their totals
    losses = torch.nn.functional.cross_entropy(outputs.mT, batch["targets"], reduction="none")
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def config():
    return RunConfig(components=Components(model=lambda run: Bigram(257, 257), objective=objective))
'''


@click.command("init")
@click.argument("path", required=False, type=ExpandedPath(dir_okay=False))
@click.option("--python", "as_python", is_flag=True, help="A Python file with a model and objective of your own.")
@click.option("--task", type=click.Choice(TASKS), help="A short file for this task, and not every option there is.")
@common_options
def command(path: str | None, as_python: bool, task: str | None, as_json: bool) -> None:
    """Write a commented starter configuration to PATH (default run.toml, or run.py with --python).

    An existing file is never overwritten.
    """
    if as_python and task:
        raise ConfigError(
            given=f"init --python --task {task}",
            rule="a task's file is TOML; a Python file brings a model and data of its own",
            consequence="nothing was written",
            nearest="one of them",
        )
    target = Path(path or ("run.py" if as_python else "run.toml"))
    if as_python:
        text = PYTHON_TEMPLATE.replace("{name}", target.name)
    else:
        text = task_starter(task, target.name) if task else starter(RunConfig)
    try:
        with open_new(target) as file:
            file.write(text.encode())
    except FileExistsError:
        raise ConfigError(
            given=f"init {target}",
            rule="a file that exists is not overwritten",
            consequence="nothing was written",
            nearest=f"another name, or remove {target} first",
        ) from None
    except OSError as error:
        raise ConfigError(
            given=f"init {target}: {error.strerror}",
            rule="the file can be created",
            consequence="nothing was written",
            nearest="a path in a folder that exists and that you may write to",
        ) from None
    text = f"wrote {target}; try: unisono train {shlex.quote(str(target))}"
    print_result(as_json, {"path": str(target)}, text)
