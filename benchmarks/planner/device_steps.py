"""Memory and time of steps on one accelerator, as they are predicted and as they are. Prints JSON.

    python -m benchmarks.planner.device_steps [--limit N] [--steps N]

A GPT of a Llama's shape is trained on one device by the trainer. Before, its step is traced without values (``unisono train
--dry-run``) on the same device, and predicted from its shape alone (``unisono plan simulate``). Without an accelerator there is
nothing to compare, and the script ends with exit code 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

STEPS: Final = 8
BASE: Final[Mapping[str, Any]] = {
    "num_layers": 16,
    "dim": 2048,
    "num_heads": 16,
    "num_kv_heads": 8,
    "ffn_dim": 5632,
    "vocab_size": 32000,
    "seq_len": 2048,
    "micro_batch": 4,
    "global_batch": 4,
    "precision": "bf16",
    "recompute": "none",
    "compile": "off",
}
WIDE: Final = {"num_layers": 8, "dim": 4096, "num_heads": 32, "ffn_dim": 14336}
CHANGES: Final[Sequence[Mapping[str, Any]]] = (
    {},
    {"micro_batch": 1, "global_batch": 1},
    {"micro_batch": 2, "global_batch": 8},
    {"micro_batch": 8, "global_batch": 8},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"micro_batch": 16, "global_batch": 16, "recompute": "full"},
    {"seq_len": 8192, "micro_batch": 1, "global_batch": 1},
    {"num_layers": 4},
    WIDE,
    {**WIDE, "recompute": "full"},
    {"precision": "fp32", "micro_batch": 1, "global_batch": 1},
    {"compile": "regional"},
    {**WIDE, "compile": "regional"},
)


class Tokens:
    """Random sequences."""

    fingerprint = "random-tokens-1"

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        self._tokens = np.random.default_rng(0).integers(0, vocab_size, (64, seq_len + 1))

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Samples as a loader wants them."""
        tokens = self._tokens[indices]
        ones = np.ones(tokens[:, 1:].shape, np.float32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": ones, "target_bytes": ones}


def trainer(layout: Mapping[str, Any], folder: Path, device: torch.device) -> Any:
    """The trainer of a layout."""
    from unisono import (
        CheckpointOptions,
        ModelOptions,
        ObserveOptions,
        OptimOptions,
        PlanOptions,
        Trainer,
        TrainOptions,
    )
    from unisono.data.options import LoaderOptions
    from unisono.models.gpt import GPT
    from unisono.train.objectives import next_token

    names = ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
    with device:
        model = GPT(ModelOptions(tied=False, **{name: layout[name] for name in names}))
    of_plan = ("micro_batch", "global_batch", "precision", "recompute", "compile")
    return Trainer(
        model,
        Tokens(layout["vocab_size"], layout["seq_len"]),
        PlanOptions(device=device.type, **{name: layout[name] for name in of_plan}),
        objective=next_token,
        optimizer=OptimOptions(lr=1e-4),
        options=TrainOptions(steps=1000, eval_every_steps=0),
        checkpoint=CheckpointOptions(every_steps=0),
        observe=ObserveOptions(console="off", trackers=(), report=False),
        loader=LoaderOptions(num_workers=0),
        run_dir=folder,
    )


def traced_bytes(layout: Mapping[str, Any], device: torch.device) -> int | None:
    """Bytes at the peak of a traced step; None for a compiled one, which is traced as it is without."""
    if layout["compile"] != "off":
        return None
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        (rank,) = trainer(layout, Path(folder), device).dry_run(1)
    return rank.peak.bytes


class _EnoughError(Exception):
    """Leaves a run without its last checkpoint."""


def run(layout: Mapping[str, Any], device: torch.device, steps: int) -> dict[str, Any]:
    """Bytes of the allocator above what it held before, and seconds of a step."""
    seconds: list[float] = []
    held = torch.accelerator.memory_allocated()
    facts: dict[str, Any] = {}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder,
            trainer(layout, Path(folder), device) as made,
        ):
            taken = iter(made)
            for number in range(steps):
                if number == 3:  # the optimizer's state is there, kernels are chosen
                    torch.accelerator.reset_peak_memory_stats()
                torch.accelerator.synchronize()
                begin = time.perf_counter()
                next(taken)
                torch.accelerator.synchronize()
                seconds.append(time.perf_counter() - begin)
            facts["allocated_bytes"] = torch.accelerator.max_memory_allocated() - held
            facts["reserved_bytes"] = torch.accelerator.max_memory_reserved()
            raise _EnoughError
    except _EnoughError:
        return {**facts, "step_s": statistics.median(seconds[3:])}


def from_shape(layout: Mapping[str, Any], device_name: str) -> dict[str, float] | None:
    """What ``unisono plan simulate`` says; None for what it does not know."""
    from unisono.planner.devices import find_device
    from unisono.planner.layout import Layout
    from unisono.planner.model_shape import ModelShape
    from unisono.planner.simulate import predict

    device = find_device(device_name)
    if device is None or layout["precision"] not in device.tflops:
        return None
    shape = ModelShape(
        layers=layout["num_layers"],
        hidden=layout["dim"],
        heads=layout["num_heads"],
        kv_heads=layout["num_kv_heads"],
        head_dim=layout["dim"] // layout["num_heads"],
        ffn=layout["ffn_dim"],
        gated=True,
        vocab=layout["vocab_size"],
    )
    (predicted,) = predict(
        [
            Layout(
                model=shape,
                device=device,
                precision=layout["precision"],
                num_devices=1,
                micro_batch=layout["micro_batch"],
                global_batch=layout["global_batch"],
                seq_len=layout["seq_len"],
                recompute=layout["recompute"],
                compiled=layout["compile"] != "off",
            )
        ]
    )
    return {"step_s": predicted.step_s, "spread": predicted.spread}


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=len(CHANGES))
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        print("no accelerator here", file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    rows: list[dict[str, Any]] = []
    for changes in CHANGES[: arguments.limit]:
        layout = {**BASE, **changes}
        gc.collect()  # a trainer is in reference cycles
        torch.accelerator.empty_cache()
        traced = traced_bytes(layout, device)
        gc.collect()
        rows.append({**layout, "traced_bytes": traced, **run(layout, device, arguments.steps)})
        rows[-1]["from_shape"] = from_shape(layout, name)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    timed = [row for row in rows if row["from_shape"]]
    result = {
        "device": name,
        "memory": {
            "traced": _accuracy([(row["traced_bytes"], row["allocated_bytes"]) for row in rows if row["traced_bytes"]])
        },
        "time": {
            kind: _accuracy(
                [(row["from_shape"]["step_s"], row["step_s"]) for row in timed if (row["compile"] != "off") == compiled]
            )
            for kind, compiled in (("eager", False), ("compiled", True))
        },
        "rows": rows,
    }
    print(json.dumps(result))
    return 0


def _accuracy(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Predicted over real of ``pairs``: the median error, and the range."""
    ratios = [predicted / real for predicted, real in pairs]
    return {
        "median": statistics.median(abs(ratio - 1) for ratio in ratios),
        "least": min(ratios),
        "most": max(ratios),
        "layouts": len(ratios),
    }


if __name__ == "__main__":
    sys.exit(main())
