"""The folder of a compressed model: a run's folder, which every command reads, with an export that transformers loads.

``config.toml``       the run's configuration, with what the compression changed
``checkpoints/``      one checkpoint with the model's tensors
``export/``           the Hugging Face layout, with a model card (``README.md``)
``compression.json``  what was done, and the figures before and after
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from unisono.checkpoint.conversion import write_model
from unisono.compress.figures import Comparison
from unisono.config import Resolved
from unisono.config.values import CALLABLE
from unisono.errors import CheckpointError
from unisono.sanitize import printable
from unisono.storage.directory import make_folder
from unisono.storage.files import FOLDER_MODE, os_reason, write_atomically
from unisono.storage.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, RUN_FILE
from unisono.train.config import RunConfig
from unisono.train.run_export import export_run
from unisono.train.trained import TrainedRun
from unisono.train.whole_model import saved_names

RECORD_FILE: Final = "compression.json"
EXPORT_FOLDER: Final = "export"
_NOT_ON_CARD: Final = (
    *("what", "source", "figures", "layers", "sensitivity", "kept_heads", "kept_dense", "by_magnitude"),
)


def write_result(
    out: Path,
    run: TrainedRun,
    resolved: Resolved[RunConfig],
    model: nn.Module,
    *,
    source_hash: str,
    comparison: Comparison,
    record: Mapping[str, Any],
) -> None:
    """Write the folder of a compressed model. It appears whole or not at all.

    Args:
        out: The folder, which does not exist.
        run: The run that the model is of.
        resolved: The configuration of the compressed model.
        model: The model.
        source_hash: Hash of the run's configuration, of which the model was made.
        comparison: The figures before and after.
        record: What was done, as JSON types; ``what`` is a line about it.

    Raises:
        CheckpointError: The folder cannot be written, or no class of transformers computes the same as the model.
    """
    target = Path(os.path.abspath(out))
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    config = replace(resolved.value, run=replace(resolved.value.run, dir=str(out)))
    resolved = resolved.updated(config, ["run.dir"], "--out")
    source = {"run": run.config.run.dir, "step": run.step, "config": source_hash}
    facts = {"source": source, **record, "figures": comparison.as_json()}
    try:
        make_folder(target.parent)
        unfinished.mkdir(mode=FOLDER_MODE)
        write_atomically(unfinished / RUN_FILE, resolved.to_toml().encode())
        if _is_of_a_script(resolved):
            write_atomically(unfinished / PLAN_FILE, (Path(run.config.run.dir) / PLAN_FILE).read_bytes())
        tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        first = saved_names(model)
        write_model(
            unfinished / CHECKPOINTS_FOLDER,
            {name: tensor for name, tensor in tensors.items() if first[name] == name},
            step=run.step,
            meta={**run.meta, "compression": facts},
        )
        card = model_card(run, comparison, facts)
        # model.pretrained of the new configuration may be the export itself, so the tokenizer is that of the source
        export_run(model, run.config, run.sources.tokenizer, unfinished / EXPORT_FOLDER, card=card)
        write_atomically(unfinished / RECORD_FILE, (json.dumps(facts, indent=2) + "\n").encode())
        unfinished.rename(target)
    except OSError as error:
        raise CheckpointError(
            given=f"the folder {out}: {os_reason(error)}",
            rule="a compressed model is written into a new folder",
            consequence="nothing was written",
            nearest="another folder (--out), where you may write and which has room for the weights twice",
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _is_of_a_script(resolved: Resolved[RunConfig]) -> bool:
    """Whether labels stand for code that a command was given: such a run's folder has a plan beside its configuration."""
    labels = (text for text in resolved.encoded.values() if isinstance(text, str))
    return resolved.python is None and any(text.startswith(CALLABLE) for text in labels)


def model_card(run: TrainedRun, comparison: Comparison, facts: Mapping[str, Any]) -> str:
    """The text of a model card, in the form of the Hugging Face hub: what the model is of, and its figures.

    Args:
        run: The run that the model is of.
        comparison: The figures before and after.
        facts: What was done; ``what`` is a line about it.
    """
    order: Mapping[str, Any] = run.meta.get("order", {})
    environment: Mapping[str, Any] = run.meta.get("environment", {})
    # a code span, which neither Markdown nor HTML in a folder's name ends
    name = f"`{printable(Path(run.config.run.dir).name).replace('`', chr(39))}`"
    lines = [
        "---",
        "library_name: unisono",
        "tags:",
        "- unisono",
        "---",
        "",
        f"# {name}, {facts['what']}",
        "",
        f"- model: `{type(run.model).__name__}`, step {run.step} of the run {name}",
        f"- configuration: `{facts['source']['config']}`",
        *([f"- training data: `{order['data']}`"] if "data" in order else []),
        *([f"- plan of the training: `{json.dumps(_short(environment['plan']))}`"] if "plan" in environment else []),
        *(f"- {name}: `{json.dumps(value)}`" for name, value in facts.items() if name not in _NOT_ON_CARD),
        "",
        "| | before | after |",
        "|---|---|---|",
    ]
    before, after = comparison.before, comparison.after
    lines += [f"| {name} | {value:.4f} | {after.evaluation[name]:.4f} |" for name, value in before.evaluation.items()]
    for name, label in (("stored_bytes", "size on disk"), ("peak_bytes", "peak memory of a forward pass")):
        sizes = (f"{getattr(figures, name) / 2**20:.2f} MiB" for figures in (before, after))
        lines.append(f"| {label} | {' | '.join(sizes)} |")
    low, high = comparison.latency_quartiles
    lines += [
        "",
        f"Loss and metrics are of {comparison.judged_by()}. A forward pass of {comparison.micro_batch} samples on "
        f"{comparison.device} took {comparison.latency_ratio:.2f} times as long as before (quartiles {low:.2f} to {high:.2f}), "
        f"on the machine that made this model; {comparison.verdict()}.",
    ]
    return "\n".join(lines) + "\n"


def _short(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The decisions of a plan that tell how a model was trained, without how it was made fast."""
    sections = ("mesh", "batch", "precision", "sync")
    return {
        key: value for key, value in plan.items() if key.split(".")[0] in sections and value not in (None, [], "none")
    }
