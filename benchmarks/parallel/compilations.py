"""How often a compiled run compiles again: graphs made by torch.compile, by step. Prints JSON.

    python -m benchmarks.parallel.compilations [--epochs 4]

A small GPT in one process, in steps of 8 samples as two micro-batches, over epochs of 37 samples, so that the last step is
short in the ways the loader knows. Warm-up is the first epoch; after it nothing may be compiled.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from unisono import CheckpointOptions, ModelOptions, PlanOptions, Trainer, TrainOptions
from unisono.data.options import LoaderOptions
from unisono.models.gpt import GPT
from unisono.train.objectives import next_token

SAMPLES, SEQ_LEN, VOCAB, BATCH, MICRO_BATCH = 37, 32, 64, 8, 4
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
LAST_BATCHES = ("rollover", "pad", "keep")


class Tokens:
    """Random sequences."""

    fingerprint = "benchmark"

    def __init__(self) -> None:
        self._tokens = np.random.default_rng(0).integers(0, VOCAB, (SAMPLES, SEQ_LEN + 1))

    def __len__(self) -> int:
        return SAMPLES

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = self._tokens[indices]
        weights = np.ones((len(tokens), SEQ_LEN), np.float32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def graphs(compile_kind: Any, last_batch: Any, epochs: int, folder: Path) -> list[int]:
    """Graphs compiled in each step."""
    torch.compiler.reset()
    torch.manual_seed(0)
    counters.clear()
    model = GPT(ModelOptions(num_layers=2, dim=32, num_heads=2, num_kv_heads=1, vocab_size=VOCAB))
    plan = PlanOptions(
        device="cpu", precision="fp32", global_batch=BATCH, micro_batch=MICRO_BATCH, compile=compile_kind
    )
    counted: list[int] = []
    with Trainer(
        model,
        Tokens(),
        plan,
        objective=next_token,
        options=TrainOptions(steps=epochs * STEPS_PER_EPOCH, eval_every_steps=0),
        checkpoint=CheckpointOptions(every_steps=0),
        loader=LoaderOptions(last_batch=last_batch),
        run_dir=folder,
    ) as run:
        for _ in run:
            counted.append(counters["stats"]["unique_graphs"] - sum(counted))
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    for compile_kind in ("model", "regional"):
        for last_batch in LAST_BATCHES:
            with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
                counted = graphs(compile_kind, last_batch, arguments.epochs, Path(folder))
            rows[f"{compile_kind}, last batch {last_batch}"] = {
                "first_step": counted[0],
                "rest_of_first_epoch": sum(counted[1:STEPS_PER_EPOCH]),
                "after_first_epoch": sum(counted[STEPS_PER_EPOCH:]),
                "steps": len(counted) - STEPS_PER_EPOCH,
            }
    print(json.dumps({"rows": rows, "samples": SAMPLES, "batch": BATCH, "micro_batch": MICRO_BATCH}, indent=1))


if __name__ == "__main__":
    main()
