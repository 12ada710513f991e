"""Structured pruning: the model without some heads, hidden units and blocks, as one of its class with smaller sizes.

The same number is removed from every block, because the sizes of a configuration are those of all blocks. The width of the
hidden states stays.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.compress.scores import Criterion, block_scores, unit_scores
from unisono.compress.units import (
    KNOWN,
    Architecture,
    PruneUnits,
    architecture_of,
    block_names,
    family_of,
    head_counts,
    head_units,
    hidden_units,
)
from unisono.config import Resolved
from unisono.errors import ConfigError
from unisono.models.gpt import GPT
from unisono.models.layer_patterns import matching_layers
from unisono.models.resnet import ResNet
from unisono.tasks.model_names import MODELS
from unisono.train.build import build_model
from unisono.train.config import AUTO, RunConfig
from unisono.train.trained import TrainedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What is to be removed.

    Attributes:
        heads: Fraction of the query heads.
        ffn: Fraction of the hidden units.
        layers: Number of blocks.
        criterion: How the least important are found.
        samples: Training samples that it reads.
        skip: Name patterns of blocks that stay.
    """

    heads: float
    ffn: float
    layers: int
    criterion: Criterion
    samples: int
    skip: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What stays of a model.

    Attributes:
        architecture: Of the model.
        units: Units of each kind, and the numbers [num_groups, n] of those that stay.
        layers: Numbers of the blocks that stay.
        blocks: Names of all blocks.
        removal: What was to be removed.
    """

    architecture: Architecture
    units: list[tuple[PruneUnits, Tensor]]
    layers: list[int]
    blocks: list[str]
    removal: Removal

    def of_block(self, block: str, kind: str) -> list[tuple[PruneUnits, Tensor]]:
        """Those of one block and kind."""
        return [pair for pair in self.units if (pair[0].block, pair[0].kind) == (block, kind)]


def choose(run: TrainedRun, model: nn.Module, removal: Removal) -> Kept:
    """What stays of a model, which is left as it is.

    Args:
        run: The run, whose training samples are read.
        model: The model.
        removal: What is to be removed.

    Raises:
        ConfigError: The model is not known, has no such parts, or would have none left.
    """
    architecture = architecture_of(model)
    kinds = {"heads": removal.heads, "ffn": removal.ffn, "layers": removal.layers}
    asked = [kind for kind, amount in kinds.items() if amount]
    if architecture is None:
        raise _refused(
            f"--{asked[0]} for a {type(model).__name__}",
            f"heads, hidden units and layers are known of {KNOWN}",
            "--sparsity, which sets weights of any model to 0",
        )
    for kind in asked:
        if kind in architecture.refused:
            raise _refused(
                f"--{kind} for {architecture.what}",
                f"the result is a model of the same class, and {architecture.refused[kind]}",
                " or ".join(f"--{other}" for other in kinds if other not in architecture.refused),
            )
    blocks = block_names(model, architecture)
    layers = _kept_layers(run, model, blocks, removal)
    units: list[PruneUnits] = []
    counts: list[int] = []
    if removal.heads:
        whole, count = _kept_heads(*head_counts(model), removal.heads)
        units += head_units(model, architecture, whole_groups=whole)
        counts += [count] * len(units)
    if removal.ffn:
        hidden = list(hidden_units(model, architecture))
        units += hidden
        counts += [_kept_hidden(model, unit.units_per_group, removal.ffn) for unit in hidden]
    scores = unit_scores(run, model, units, removal.criterion, removal.samples) if units else []
    chosen = [_highest(score, count) for score, count in zip(scores, counts, strict=True)]
    return Kept(
        architecture=architecture,
        units=list(zip(units, chosen, strict=True)),
        layers=layers,
        blocks=blocks,
        removal=removal,
    )


def smaller_model(
    run: TrainedRun, resolved: Resolved[RunConfig], kept: Kept
) -> tuple[nn.Module, Resolved[RunConfig], dict[str, Any]]:
    """The model of what is kept, the configuration by which it is built, and its new sizes by name.

    Args:
        run: The run.
        resolved: Its configuration.
        kept: What stays.

    Raises:
        ConfigError: The configuration does not decide the sizes of the model.
    """
    model = run.model
    tensors = _tensors(model, kept)
    config = resolved.value
    if family_of(model):
        made, sizes = _of_transformers(model, kept)
        settings = {}
    else:
        name = config.components.model
        if not isinstance(name, str) or name not in (AUTO, *MODELS):
            raise _refused(
                f"a {type(model).__name__} that code of your own builds",
                "the sizes of a built-in model are settings of section model, and the result has smaller ones",
                "the same model by components.model and section model, with the weights by model.weights",
            )
        sizes = _settings(model, kept)
        settings = {**sizes, "weights": ""}
        smaller = replace(config, model=replace(config.model, **settings))
        made = build_model(smaller, run.sources.tokenizer)
    changed = replace(config, model=replace(config.model, **settings))
    made.load_state_dict(tensors)
    made = made.eval().to(run.device)
    return made, resolved.updated(changed, [f"model.{name}" for name in settings], "unisono prune"), sizes


def masked_copy(model: nn.Module, units: Sequence[tuple[PruneUnits, Tensor]]) -> nn.Module:
    """A copy of the model in which removed units have no effect, with the same shapes."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    for unit, chosen in units:
        unit.mask(parameters[unit.consumer.name], chosen)
    return model


def hidden_name(model: nn.Module) -> str:
    """What ``--ffn`` removes from a model."""
    return "inner channels" if isinstance(model, ResNet) else "hidden units"


def _kept_layers(run: TrainedRun, model: nn.Module, blocks: Sequence[str], removal: Removal) -> list[int]:
    if not removal.layers:
        return list(range(len(blocks)))
    skipped = set(matching_layers(blocks, removal.skip))
    free = [number for number, block in enumerate(blocks) if block not in skipped]
    most = min(len(free), len(blocks) - 1)
    if removal.layers > most:
        raise _refused(
            f"--layers {removal.layers} of {len(blocks)} blocks"
            + (f", of which {len(skipped)} stay" if skipped else ""),
            "at least one block stays, and those of --skip",
            f"--layers {most}" if most else "--heads or --ffn",
        )
    scores = block_scores(run, model, blocks, removal.criterion, removal.samples)
    removed = set(sorted(free, key=lambda number: (scores[number], number))[: removal.layers])
    return [number for number in range(len(blocks)) if number not in removed]


def _kept_heads(heads: int, kv_heads: int, fraction: float) -> tuple[bool, int]:
    """Whether key/value heads go with their query heads, and how many units of a group stay."""
    group = heads // kv_heads
    removed = int(fraction * heads + 0.5)
    if removed < heads and removed and removed % group == 0:
        return True, kv_heads - removed // group
    if removed < heads and removed and removed % kv_heads == 0:
        return False, group - removed // kv_heads
    legal = [n for n in range(1, heads) if n % group == 0 or n % kv_heads == 0]
    nearest = sorted(legal, key=lambda n: abs(n / heads - fraction))[:1]
    raise _refused(
        f"--heads {fraction:g} of {heads} query heads and {kv_heads} key/value heads",
        "whole key/value heads are removed, or equally many query heads of each, and at least one stays",
        f"--heads {nearest[0] / heads:g}" if nearest else "--ffn or --layers",
    )


def _kept_hidden(model: nn.Module, hidden: int, fraction: float) -> int:
    """How many of ``hidden`` units stay."""
    kept = hidden - int(fraction * hidden + 0.5)
    if isinstance(model, ResNet):  # stages in the proportion of their widths
        options = model.options
        width = next(width for width in options.widths if options.inner(width) == hidden)
        first = options.inner(options.widths[0])
        kept = replace(options, inner_width=max(1, first - int(fraction * first + 0.5))).inner(width)
    if not 0 < kept < hidden:
        raise _refused(
            f"--ffn {fraction:g} of {hidden} {hidden_name(model)}",
            "at least one is removed and at least one stays",
            f"--ffn {1 / hidden:.2g}" if kept else f"--ffn {1 - 1 / hidden:.2g}",
        )
    return kept


def _highest(scores: Tensor, count: int) -> Tensor:
    """The numbers [num_groups, count] of the highest ``scores`` [num_groups, units_per_group], sorted; of equal ones the last."""
    return scores.argsort(dim=1, stable=True)[:, scores.shape[1] - count :].sort(dim=1).values


@torch.no_grad()
def _tensors(model: nn.Module, kept: Kept) -> dict[str, Tensor]:
    """The tensors of the smaller model by their names there."""
    tensors: dict[str, Tensor] = dict(model.state_dict())
    for units, chosen in kept.units:
        for part in units.tensors:
            tensors[part.name] = units.select(part, tensors[part.name], chosen)
    places = {kept.blocks[number]: place for place, number in enumerate(kept.layers)}
    found: dict[str, Tensor] = {}
    prefix = f"{kept.architecture.blocks}."
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            found[name] = tensor
            continue
        number, _, rest = name.removeprefix(prefix).partition(".")
        if f"{prefix}{number}" in places:
            found[f"{prefix}{places[f'{prefix}{number}']}.{rest}"] = tensor
    return found


def _new_heads(model: nn.Module, kept: Kept) -> tuple[int, int] | None:
    """Query and key/value heads that stay in each block; None for all."""
    pair = next((pair for pair in kept.units if pair[0].kind == "heads"), None)
    if pair is None:
        return None
    heads, kv_heads = head_counts(model)
    units, chosen = pair
    if units.num_groups == 1 and units.units_per_group == kv_heads:
        return chosen.shape[1] * (heads // kv_heads), chosen.shape[1]
    return chosen.numel(), kv_heads


def _new_hidden(kept: Kept) -> int | None:
    return next((chosen.shape[1] for units, chosen in kept.units if units.kind == "ffn"), None)


def _settings(model: nn.Module, kept: Kept) -> dict[str, Any]:
    """The settings of section model that are other ones."""
    settings: dict[str, Any] = {}
    if len(kept.layers) < len(kept.blocks):
        settings["num_layers"] = len(kept.layers)
    if isinstance(model, GPT) and (heads := _new_heads(model, kept)):
        settings |= {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": model.options.head_width}
    hidden = _new_hidden(kept)
    if hidden is not None:
        settings["ffn_dim"] = hidden
    return settings


def _of_transformers(model: nn.Module, kept: Kept) -> tuple[nn.Module, dict[str, Any]]:
    """An empty model of the same class with smaller sizes, and these by the names of its configuration."""
    theirs = cast(Any, model)
    config = copy.deepcopy(theirs.config)
    sizes: dict[str, Any] = {}
    if len(kept.layers) < len(kept.blocks):
        sizes["num_hidden_layers"] = len(kept.layers)
        kinds = getattr(config, "layer_types", None)
        if kinds:
            sizes["layer_types"] = [kinds[number] for number in kept.layers]
    if heads := _new_heads(model, kept):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": width}
    hidden = _new_hidden(kept)
    if hidden is not None:
        sizes["intermediate_size"] = hidden
    for name, value in sizes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        made = type(model)(config)
    if theirs.can_generate():
        cast(Any, made).generation_config = copy.deepcopy(theirs.generation_config)
    return made, sizes


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was pruned", nearest=nearest)
