"""Exports the model of a run with what the run knows of its inputs: length, tokenizer and task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from unisono.data.tokens.tokenizer import BYTES, Tokenizer, tokenizer_file
from unisono.interop.huggingface import export
from unisono.train.build import export_facts, tokenizer_spec
from unisono.train.config import RunConfig


def export_run(
    model: nn.Module, config: RunConfig, tokenizer: Tokenizer | None, folder: Path | None = None, **how: Any
) -> Path:
    """Export the model of a run (``interop.export``), by default to ``<run.dir>/export``.

    Args:
        model: The unsharded model.
        config: Configuration of the run.
        tokenizer: Its tokenizer; None for a model without texts.
        folder: Folder of the export.
        how: More arguments of ``export``.
    """
    spec = tokenizer_spec(config)
    from_file = tokenizer is not None and spec != BYTES
    return export(
        model,
        folder or Path(config.run.dir) / "export",
        max_length=config.data.seq_len,
        end_of_document=tokenizer.end_of_document if tokenizer else None,
        tokenizer=tokenizer_file(spec) if from_file else None,
        task=export_facts(config),
        **how,
    )
