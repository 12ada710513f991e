"""One story: texts are cleaned and packed, a plan is made, a model trained, diagnosed, pruned, tuned again and quantized.

python from_texts_to_int4.py FOLDER
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

NAMES = ("ada", "ben", "cem", "dia", "eva", "fay", "gus", "ida")
THINGS = ("apples", "books", "cups", "doors", "eggs", "forks")


def unisono(*arguments: object) -> dict:
    """The JSON that a command prints."""
    print("unisono", *arguments)
    command = [sys.executable, "-m", "unisono", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def write_texts(path: Path) -> None:
    """Sentences of a small world; every fifth text is a copy of an earlier one, and every ninth is too short."""
    draw = random.Random(0)
    texts: list[str] = []
    for number in range(400):
        a, b = draw.sample(NAMES, 2)
        text = f"{a} has {number % 90} {draw.choice(THINGS)} and gives {draw.randrange(9)} of them to {b} on day {number}. "
        text += f"then {b} has {draw.choice(THINGS)} too, and {a} says thanks for day {number}."
        if number % 5 == 4:
            text = draw.choice(texts)
        texts.append(a if number % 9 == 8 else text)
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def main(folder: str) -> None:
    root = Path(folder)
    write_texts(root / "raw" / "texts.jsonl")
    unisono("data", "clean", root / "raw" / "texts.jsonl", "--out", root / "clean", "--set", "filter.min_words=5")
    kept = (root / "clean" / "data" / "texts.jsonl").read_text().splitlines()
    assert 200 < len(kept) < 330, len(kept)  # copies and short texts are gone
    (root / "tokens").mkdir()
    unisono(
        "data", "pack", root / "clean" / "data" / "texts.jsonl", root / "tokens" / "texts.bin", "--text-column", "text"
    )

    settings = [
        f"--set=data.train={root / 'tokens'}",
        "--set=data.seq_len=64",
        "--set=model.num_layers=2",
        "--set=model.dim=64",
        "--set=plan.global_batch=16",
        "--set=train.steps=120",
    ]
    plan = root / "plan.json"
    unisono("plan", "export", *settings, "--output", plan)
    unisono("plan", "check", plan)
    whole = root / "whole"
    unisono("train", *settings, "--plan", plan, f"--set=run.dir={whole}")
    findings = unisono("diagnose", whole)
    assert "findings" in findings, findings

    small, tuned, int4 = root / "small", root / "tuned", root / "int4"
    pruned = unisono("prune", whole, "--heads", 0.5, "--ffn", 0.5, "--out", small)
    again = (f"--set=model.weights={small}", f"--set=run.dir={tuned}", "--set=train.steps=60")
    unisono("train", small / "config.toml", *again)
    made = unisono("quantize", tuned, "--scheme", "int4", "--max-drop", 0.1, "--out", int4)

    parts = (
        ("whole", pruned, "before"),
        ("small", pruned, "after"),
        ("tuned", made, "before"),
        ("int4", made, "after"),
    )
    losses = {name: result["figures"][when]["evaluation"]["loss"] for name, result, when in parts}
    sizes = {name: made["figures"][name]["stored_bytes"] for name in ("before", "after")}
    print(", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()), "nats of held-out text;", sizes, "bytes")
    assert losses["tuned"] < losses["small"]
    assert losses["int4"] < 1.1 * losses["tuned"]
    assert sizes["after"] < 0.6 * sizes["before"]
    assert abs(unisono("eval", int4)["evaluation"]["loss"] - losses["int4"]) < 1e-4
    text = unisono("generate", int4, "--prompt", "ada has ", "--tokens", 40)["text"]
    assert text.startswith("ada has ")
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
