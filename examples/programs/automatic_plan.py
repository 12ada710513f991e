"""A GPT on four processes under the plan that the planner chooses, and the same run under one that is given.

python automatic_plan.py FOLDER
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
        lines = [f"def add_{n}(x):\n    return x + {n * number % 50}\n" for n in range(40)]
        (root / "texts" / f"{number}.py").write_text("\n".join(lines))
    (root / "run.toml").write_text(
        f"""
[data]
corpus = "{root / "texts"}"
seq_len = 32
[model]
num_layers = 2
dim = 64
[plan]
global_batch = 8
precision = "fp32"
micro_batch = 2
recompute = "none"  # what is set stays: the planner chooses the rest
cp = 1
pp = 1
[train]
steps = 20
[launch]
num_processes = 4
"""
    )
    config = root / "run.toml"
    unisono("plan", "calibrate", "--processes", 4)  # once on a machine
    auto = unisono("train", "--plan", "auto", config, f"--set=run.dir={root / 'auto'}")["evaluation"]["loss"]
    plain = unisono("train", config, f"--set=run.dir={root / 'plain'}")["evaluation"]["loss"]
    chosen = json.loads((root / "auto" / "plan.json").read_text())
    mesh = {axis: size for axis, size in chosen["mesh"].items() if isinstance(size, int) and size > 1}
    print(
        f"the planner chose {mesh} for 4 processes; held-out loss {auto:.5f}, with data parallelism alone {plain:.5f}"
    )
    assert abs(auto - plain) < 1e-3 * plain  # the plan decides who computes what, and nothing else


if __name__ == "__main__":
    main(*sys.argv[1:])
