"""A GPT with experts whose two ranks hold half of the experts each, against one process that holds all.

python shared_experts.py FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def unisono(*arguments: object) -> dict:
    """The JSON that a command prints."""
    command = [sys.executable, "-m", "unisono", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main(folder: str) -> None:
    root = Path(folder)
    (root / "texts").mkdir(parents=True)
    for number in range(12):
        words = " ".join(f"{n * number % 17} plus {n} is {n * number % 17 + n};" for n in range(60))
        (root / "texts" / f"{number}.txt").write_text(words)
    settings = {
        "components.model": "moe",
        "model.num_experts": 4,
        "model.num_layers": 2,
        "model.dim": 64,
        "data.corpus": root / "texts",
        "data.seq_len": 32,
        "plan.global_batch": 8,
        "plan.precision": "fp32",
        "train.steps": 30,
    }
    shared = {"plan.ep": 2, "plan.dp_shard": 2, "launch.num_processes": 2}
    losses = {}
    for name, more in (("one", {}), ("two", shared)):
        given = {**settings, **more, "run.dir": root / name}
        unisono("train", *(f"--set={key}={value}" for key, value in given.items()))
        losses[name] = unisono("eval", root / name)["evaluation"]["loss"]
    print(f"held-out loss: one process {losses['one']:.5f}, experts shared by two {losses['two']:.5f}")
    assert abs(losses["one"] - losses["two"]) < 1e-3 * losses["one"], losses


if __name__ == "__main__":
    main(*sys.argv[1:])
