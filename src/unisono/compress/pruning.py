"""Pruning of a trained model: a smaller one, sparse weights, and how much each block matters."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.compress.result import EXPORT_FOLDER
from unisono.compress.scores import without_block
from unisono.compress.smaller import Kept, Removal, choose, hidden_name, masked_copy, smaller_model
from unisono.compress.sparse import Sparsity, layer_names, sparse_copy
from unisono.compress.units import architecture_of, block_names, family_of, query_heads
from unisono.config import Resolved
from unisono.errors import ConfigError, nearest_name
from unisono.models.layer_patterns import matching_layers
from unisono.train.config import RunConfig
from unisono.train.trained import TrainedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What pruning made of a model.

    Attributes:
        model: The model.
        resolved: The configuration by which it is built.
        what: A line about what was done.
        record: The details, as JSON types.
        lines: Lines about them.
    """

    model: nn.Module
    resolved: Resolved[RunConfig]
    what: str
    record: dict[str, Any]
    lines: list[str]


def prune(
    run: TrainedRun,
    resolved: Resolved[RunConfig],
    *,
    removal: Removal,
    sparsity: Sparsity | None,
    sensitivity_samples: int | None,
    out: Path,
) -> Pruned:
    """Remove parts of the run's model, which is left as it is, then set weights of the rest to 0.

    Args:
        run: The run.
        resolved: Its configuration.
        removal: Heads, hidden units and blocks to remove; may be nothing.
        sparsity: Weights to set to 0; None for none.
        sensitivity_samples: Held-out samples by which the removal is judged block by block (0 = all); None for no such table.
        out: The folder of the result.

    Raises:
        ConfigError: The model is quantized, has adapters or no such parts, or would have none left; a name pattern fits nothing.
    """
    quantized = resolved.value.quantize.scheme
    if quantized != "none":
        raise ConfigError(
            given=f"a model with quantize.scheme {quantized!r}",
            rule="weights in floating point are pruned, and rounded after it",
            consequence="nothing was pruned",
            nearest="prune the model that it was made from, then unisono quantize, or unisono train with quantize.aware",
        )
    if resolved.value.lora.rank:
        raise ConfigError(
            given=f"a model with adapters, lora.rank {resolved.value.lora.rank}",
            rule="the export of such a model is its adapters alone, and pruning changes the weights below them",
            consequence="nothing was pruned",
            nearest="the pretrained folder itself, with model.pretrained of the result for new adapters",
        )
    structured = bool(removal.heads or removal.ffn or removal.layers)
    _check_patterns(run.model, removal, sparsity)
    model, what, record, lines = run.model, [], dict[str, Any](), list[str]()
    record["criterion"] = removal.criterion
    if structured:
        kept = choose(run, model, removal)
        model, resolved, sizes = smaller_model(run, resolved, kept)
        what.append("pruned: " + ", ".join(_parts(run.model, removal)))
        removed = sorted(set(range(len(kept.blocks))) - set(kept.layers))
        stay = {kept.blocks[number] for number in kept.layers}
        heads = {
            units.block: query_heads(run.model, units, chosen)
            for units, chosen in kept.units
            if units.kind == "heads" and units.block in stay
        }
        record |= {"sizes": sizes, "removed_layers": removed, "kept_heads": heads}
        shown = {"ffn_dim": f"ffn_dim ({hidden_name(run.model)})"}
        lines.append("new sizes: " + ", ".join(f"{shown.get(name, name)} {value}" for name, value in sizes.items()))
        if removed:
            lines.append("removed: " + ", ".join(kept.blocks[number] for number in removed))
        if sensitivity_samples is not None:
            rows = _sensitivity(run, kept, sensitivity_samples)
            record["sensitivity"] = [dict(zip(("block", "removed", "loss"), row, strict=True)) for row in rows]
            removed_parts = {"ffn": hidden_name(run.model)}
            lines.append(
                f"held-out loss when only this block is pruned; {removal.criterion} chose what is removed, not this table:"
            )
            lines += [f"  {loss:<10.4f}{block}  {removed_parts.get(kind, kind)}" for block, kind, loss in rows]
    if sparsity is not None:
        model, facts, notes = sparse_copy(run, model, sparsity)
        what.append(f"{sparsity.fraction:.0%} of weights 0 ({sparsity.pattern})")
        record["sparsity"] = facts
        lines += notes
    # a run with this configuration and another run.dir starts with the result's weights
    folder = out.absolute()
    name, start = ("pretrained", folder / EXPORT_FOLDER) if family_of(run.model) else ("weights", folder)
    changed = replace(resolved.value, model=replace(resolved.value.model, **{name: str(start)}))
    resolved = resolved.updated(changed, [f"model.{name}"], "unisono prune")
    return Pruned(model=model, resolved=resolved, what="; ".join(what), record=record, lines=lines)


def _parts(model: nn.Module, removal: Removal) -> list[str]:
    heads = [f"{removal.heads:.0%} of heads"] if removal.heads else []
    hidden = [f"{removal.ffn:.0%} of {hidden_name(model)}"] if removal.ffn else []
    layers = [f"{removal.layers} {'layer' if removal.layers == 1 else 'layers'}"] if removal.layers else []
    return [*heads, *hidden, *layers]


def _check_patterns(model: nn.Module, removal: Removal, sparsity: Sparsity | None) -> None:
    """Refuse a name pattern that fits nothing that could be pruned."""
    names = list(layer_names(model)) if sparsity is not None else []
    architecture = architecture_of(model)
    if removal.layers and architecture is not None:
        names += block_names(model, architecture)
    for pattern in removal.skip:
        if not matching_layers(names, [pattern]):
            raise ConfigError(
                given=f"--skip {pattern}",
                rule="it fits names of layers that --sparsity or --layers could prune; --heads and --ffn prune all blocks alike",
                consequence="nothing was pruned",
                nearest=nearest_name(pattern, names) if names else "leave --skip out, or give --sparsity or --layers",
            )


@torch.no_grad()
def _sensitivity(run: TrainedRun, kept: Kept, samples: int) -> list[tuple[str, str, float]]:
    """(block, what is removed, held-out loss) for each block and kind alone, the largest loss first; layers: each one."""
    found: list[tuple[str, str, float]] = []
    for block in kept.blocks:
        for kind in ("heads", "ffn"):
            if units := kept.of_block(block, kind):
                loss = run.evaluate(masked_copy(run.model, units), samples)["loss"]
                found.append((block, kind, loss))
        if kept.removal.layers:
            model = copy.deepcopy(run.model)
            with without_block(model, block):
                found.append((block, "layer", run.evaluate(model, samples)["loss"]))
    return sorted(found, key=lambda row: -row[2])
