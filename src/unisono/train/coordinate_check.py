"""Sizes of activations of a GPT before and after a few steps, for the coordinate check of muP (``tune.coordinates``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from unisono.config import Resolved
from unisono.data.loading.loader import eval_batches, to_device
from unisono.dist import JobSpec
from unisono.errors import ConfigError
from unisono.models.gpt import GPT
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import with_strategy_file
from unisono.train.build import build_data, build_trainer
from unisono.train.callbacks import restored
from unisono.train.config import RunConfig
from unisono.train.setup import init_distributed, open_events, resolve_plan
from unisono.train.step import input_selector

PROBE_SAMPLES: Final = 8


def measure_changes(resolved: Resolved[RunConfig], run_dir: Path) -> dict[str, list[float]]:
    """Train as ``resolved`` says, in this process alone, and measure how far activations move from their first values.

    The activations are those of the first held-out samples: the outputs of attention, feed-forward layer and block of each
    block, and the logits. They are the same samples after each step.

    Args:
        resolved: A configuration with a built-in GPT. Its layout on ranks is not used.
        run_dir: A new folder for the events of the training.

    Returns:
        By name of the activation, for each step the root of the mean square of its change since before the first step.

    Raises:
        ConfigError: The model is no GPT.
    """
    config = resolved.value
    options, _ = with_strategy_file(config.plan)
    plan_options = PlanOptions(
        device=options.device,
        precision=options.precision,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
    )
    config = replace(config, plan=plan_options, run=replace(config.run, dir=str(run_dir)))
    device, plan = resolve_plan(plan_options, JobSpec())
    with ExitStack() as stack:
        world = init_distributed(plan, JobSpec(), device.type, config.launch.timeout_s)
        stack.callback(world.close)
        data = build_data(config)
        events = stack.enter_context(open_events(run_dir, world))
        run = stack.enter_context(build_trainer(config, data, plan, world=world, events=events, provenance={}))
        model = run.model
        if not isinstance(model, GPT):
            raise ConfigError(
                given=f"a coordinate check of {type(model).__name__}",
                rule="it knows the widths of the built-in model gpt",
                consequence="nothing was measured",
                nearest="components.model=gpt with task.kind=language_model",
            )
        probe = to_device(next(eval_batches(data.held_out, PROBE_SAMPLES, 0, 1, PROBE_SAMPLES)), device)
        read = _reader(model, input_selector(model)(probe))
        first = read()
        changes: dict[str, list[float]] = {name: [] for name in first}
        for _ in run:
            for name, values in read().items():
                changes[name].append(float((values - first[name]).square().mean().sqrt()))
    return changes


def _reader(model: GPT, inputs: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """A function that returns the activations of ``inputs`` by name, in float32, and leaves no trace in the run."""
    watched = {
        f"blocks.{number}{part}": block.get_submodule(part.removeprefix("."))
        for number, block in enumerate(model.blocks)
        for part in (".attention", ".ffn", "")
    }

    def read() -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
                values[name] = output.detach().float()

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in watched.items()]
        try:
            with restored(model), torch.no_grad():
                model.eval()
                values["logits"] = model(**inputs).logits().float()
        finally:
            for handle in handles:
                handle.remove()
        return values

    return read
