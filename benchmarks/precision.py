"""Whether bf16 learns as fp32 does: held-out loss of the demo in both, over several seeds. Prints JSON.

    python -m benchmarks.precision [--seeds 4] [--steps 150]

``plan.precision=auto`` takes bf16 where the processor multiplies it natively. That is only a fair default if the difference
it makes to the curve is smaller than what another seed makes: ``bf16_minus_fp32`` compared with ``between_seeds`` (standard
deviation of fp32), in nats of held-out loss at the same step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def held_out_loss(precision: str, seed: int, steps: int, folder: Path) -> float:
    """The demo's last evaluation after ``steps``."""
    command = [sys.executable, "-m", "unisono", "train", "--json"]
    for setting in (
        f"run.dir={folder / f'{precision}-{seed}'}",
        f"run.seed={seed}",
        f"plan.precision={precision}",
        f"train.steps={steps}",
    ):
        command += ["--set", setting]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["evaluation"]["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    losses: dict[str, list[float]] = {"fp32": [], "bf16": []}
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        for seed in range(arguments.seeds):
            for precision, found in losses.items():
                found.append(held_out_loss(precision, seed, arguments.steps, Path(folder)))
    differences = [b - a for a, b in zip(losses["fp32"], losses["bf16"], strict=True)]
    result = {
        "held_out_loss": losses,
        "bf16_minus_fp32": {"mean": statistics.mean(differences), "largest": max(differences, key=abs)},
        "between_seeds": statistics.stdev(losses["fp32"]),
        "steps": arguments.steps,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
