"""``unisono generate``: samples text from a trained language model."""

from __future__ import annotations

import click

from unisono.cli.common import (
    FiniteRange,
    chosen_checkpoint,
    common_options,
    load_run,
    print_result,
    takes_checkpoint,
    trusts_python,
)
from unisono.errors import ConfigError


@click.command("generate")
@click.argument("run_dir", default="runs/first")
@click.option("--prompt", default="def ", show_default=True, help="What the text begins with.")
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="Tokens to write.")
@click.option(
    "--temperature",
    type=FiniteRange(min=0),
    default=0.8,
    show_default=True,
    help="0 = always the likeliest token.",
)
@click.option(
    "--seed", type=click.IntRange(min=0, max=2**63 - 1), default=0, show_default=True, help="Seed of the sampling."
)
@takes_checkpoint
@trusts_python
@common_options
def command(
    run_dir: str,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    checkpoint: str | None,
    best: bool,
    as_json: bool,
) -> None:
    """Print text written by RUN_DIR's newest checkpoint."""
    config = load_run(run_dir).value
    checkpoint = chosen_checkpoint(run_dir, checkpoint, best=best)
    from unisono.cli.rank import write_sample
    from unisono.dist import JobSpec, join_world
    from unisono.models.gpt import GPT
    from unisono.train.build import find_tokenizer
    from unisono.train.load import load_model

    tokenizer = find_tokenizer(config)
    if tokenizer is None:
        raise _refused("data of your own, or no text")
    world = join_world(JobSpec(), device_type="cpu", timeout_s=60.0)
    model, step = load_model(config, tokenizer, world, checkpoint)
    if not isinstance(model, GPT):
        raise _refused(f"{type(model).__name__} on tokens")
    text = write_sample(
        model,
        tokenizer,
        prompt=prompt,
        num_tokens=tokens,
        context=config.data.seq_len,
        seed=seed,
        temperature=temperature,
    )
    print_result(as_json, {"run_dir": run_dir, "step": step, "text": text}, text)


def _refused(what: str) -> ConfigError:
    return ConfigError(
        given=f"generate with {what}",
        rule="text is written by the reference GPT, trained on tokens",
        consequence="there is nothing to print",
        nearest="call your own model from Python",
    )
