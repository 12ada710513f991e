"""BERT learns hidden words with LAMB, warm-up and accumulation, in bf16 and in fp16 with a loss scale.

python masked_words.py FOLDER
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path


def unisono(*arguments: object) -> dict:
    """The JSON that a command prints."""
    command = [sys.executable, "-m", "unisono", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def write_texts(path: Path) -> None:
    """Sentences in which one word tells another."""
    draw = random.Random(0)
    pairs = [("cat", "mat"), ("dog", "log"), ("fox", "box"), ("bee", "tree")]
    rows = [{"text": "the {} sat on the {}".format(*draw.choice(pairs))} for _ in range(1500)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: str) -> None:
    root = Path(folder)
    write_texts(root / "texts.jsonl")
    settings = {
        "task.kind": "masked_language_model",
        "data.train": root / "texts.jsonl",
        "task.inputs": "['text']",
        "data.seq_len": 24,
        "model.num_layers": 2,
        "model.dim": 48,
        "plan.global_batch": 32,
        "plan.micro_batch": 8,  # four micro-batches are added up for each step
        "optim.kind": "lamb",
        "optim.lr": 0.02,
        "schedule.warmup_steps": 10,
        "train.steps": 120,
    }
    losses = {}
    for precision in ("bf16", "fp16"):
        run_dir = root / precision
        given = {**settings, "plan.precision": precision, "run.dir": run_dir}
        unisono("train", *(f"--set={name}={value}" for name, value in given.items()))
        losses[precision] = unisono("eval", run_dir)["evaluation"]["loss"]
    print(f"held-out loss of hidden tokens: bf16 {losses['bf16']:.3f}, fp16 {losses['fp16']:.3f} nats")
    assert max(losses.values()) < 0.5, losses  # 20 letters, guessed evenly, have 3.0
    assert abs(losses["bf16"] - losses["fp16"]) < 0.1, losses


if __name__ == "__main__":
    main(*sys.argv[1:])
