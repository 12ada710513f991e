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


def write_texts(folder: Path) -> None:
    """Sentences in which one word tells another."""
    draw = random.Random(0)
    pairs = [("cat", "mat"), ("dog", "log"), ("fox", "box"), ("bee", "tree")]
    folder.mkdir(parents=True)
    for number in range(20):
        lines = ["the {} sat on the {}\n".format(*draw.choice(pairs)) for _ in range(60)]
        (folder / f"{number}.txt").write_text("".join(lines))


def main(folder: str) -> None:
    root = Path(folder)
    write_texts(root / "texts")
    settings = {
        "task.kind": "masked_language_model",
        "data.corpus": root / "texts",
        "data.seq_len": 48,
        "model.num_layers": 2,
        "model.dim": 64,
        "plan.global_batch": 32,
        "plan.micro_batch": 8,  # four micro-batches are added up for each step
        "optim.kind": "lamb",
        "optim.lr": 0.03,
        "schedule.warmup_steps": 10,
        "train.steps": 240,
    }
    losses = {}
    for precision in ("bf16", "fp16"):
        run_dir = root / precision
        given = {**settings, "plan.precision": precision, "run.dir": run_dir}
        unisono("train", *(f"--set={name}={value}" for name, value in given.items()))
        losses[precision] = unisono("eval", run_dir)["evaluation"]["loss"]
    print(f"held-out loss of hidden tokens: bf16 {losses['bf16']:.3f}, fp16 {losses['fp16']:.3f} nats")
    assert max(losses.values()) < 1.5, losses  # 20 letters, guessed evenly, have 3.0
    assert abs(losses["bf16"] - losses["fp16"]) < 0.1, losses


if __name__ == "__main__":
    main(*sys.argv[1:])
