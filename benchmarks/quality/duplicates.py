"""Near-duplicates removed from one corpus by unisono, by rensa alone, by text-dedup and by datatrove.

Each contestant is a whole command with one process for the work: it reads the same JSONL and writes which rows it keeps, or the
rows. Start-up counts. All compare sets of five words, from a similarity of 0.8 on, with 128 hashes (datatrove: its own 14 x 8).
Recall is over planted copies whose similarity, computed from the words, is 0.8 and more, precision over rows that are dropped.

rensa alone is a script as its page shows: strings of n-grams made in Python, and its deduplicator. datatrove's tokenizer for
English needs a download; it splits at spaces here, which is faster.

    UNISONO_TEXTDEDUP_PYTHON, UNISONO_DATATROVE_PYTHON     interpreters with these packages (tests/peers/venvs.sh)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.paired import ratio, spread

HERE = Path(__file__).parent
NEAR = 0.8
WORDS = 230  # of a document, on average: 1.4 KB


def corpus(path: Path, count: int, copies: int, seed: int = 0) -> dict[int, int]:
    """Write rows of random words, and copies with a few words replaced; returns copy → original where they are near."""
    draw = random.Random(seed)
    vocabulary = [f"w{number:x}" * (1 + number % 3) for number in range(20_000)]
    weights = list(accumulate(1 / (rank + 5) for rank in range(len(vocabulary))))
    near: dict[int, int] = {}
    kept: list[list[str]] = []
    with path.open("w") as file:
        for number in range(count):
            if number >= count - copies:
                original = number - (count - copies)
                words = list(kept[original])
                for place in draw.sample(range(len(words)), draw.randrange(1, 8)):
                    words[place] = f"new{draw.randrange(1 << 30)}"
                if similarity(words, kept[original]) >= NEAR:
                    near[number] = original
            else:
                words = draw.choices(vocabulary, cum_weights=weights, k=draw.randrange(WORDS // 2, WORDS * 3 // 2))
                if number < copies:
                    kept.append(words)
            file.write(json.dumps({"id": number, "text": " ".join(words)}) + "\n")
    return near


def similarity(first: Sequence[str], second: Sequence[str]) -> float:
    a, b = (set(zip(*(words[begin:] for begin in range(5)), strict=False)) for words in (first, second))
    return len(a & b) / len(a | b)


# --- contestants: each returns the ids that are dropped ---------------------------------------------------------------


def run(command: Sequence[str]) -> tuple[float, float]:
    """(seconds, peak memory of the largest process in MiB) of a command."""
    begin_s = time.perf_counter()
    environ = os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{errors.decode()[-2000:]}")
    return time.perf_counter() - begin_s, usage.ru_maxrss / 1024


def of_unisono(source: Path, out: Path) -> tuple[tuple[float, float], set[int]]:
    cost = run(
        [
            sys.executable,
            "-m",
            "unisono",
            "data",
            "dedup",
            str(source),
            "--out",
            str(out),
            "--index-only",
            "--workers=0",
        ]
    )
    return cost, {json.loads(line)["row"] for line in (out / "dropped.jsonl").read_text().splitlines()}


def of_script(python: str, script: str) -> Callable[[Path, Path], tuple[tuple[float, float], set[int]]]:
    def contestant(source: Path, out: Path) -> tuple[tuple[float, float], set[int]]:
        cost = run([python, str(HERE / script), str(source), str(out)])
        return cost, set(json.loads((out / "dropped.json").read_text()))

    return contestant


def contestants() -> dict[str, Callable[[Path, Path], tuple[tuple[float, float], set[int]]]]:
    found: dict[str, Callable[[Path, Path], tuple[tuple[float, float], set[int]]]] = {
        "unisono": of_unisono,
        "rensa alone": of_script(sys.executable, "rensa_alone.py"),
    }
    for name, variable, script in (
        ("text-dedup", "UNISONO_TEXTDEDUP_PYTHON", "text_dedup_alone.py"),
        ("datatrove", "UNISONO_DATATROVE_PYTHON", "datatrove_alone.py"),
    ):
        if python := os.environ.get(variable):
            found[name] = of_script(python, script)
        else:
            print(f"{name} left out: {variable} is not set", file=sys.stderr)
    return found


def side_by_side(rounds: int, count: int) -> dict[str, Any]:
    runners = contestants()
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    quality: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "corpus.jsonl"
        near = corpus(source, count, count // 20)
        for index in range(rounds):
            names = list(runners)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                out = Path(folder) / f"{name}-{index}"
                cost, dropped = runners[name](source, out)
                costs[name].append(cost)
                quality[name] = {
                    "recall": len(dropped & near.keys()) / len(near),
                    "precision": len(dropped & near.keys()) / max(len(dropped), 1),
                }
                print(f"round {index}, {name}: {cost[0]:.1f} s, {cost[1]:.0f} MiB, {quality[name]}", file=sys.stderr)
        size = source.stat().st_size
    seconds = {name: [cost[0] for cost in values] for name, values in costs.items()}
    return {
        "documents": count,
        "mib": round(size / 2**20, 1),
        "planted": len(near),
        "contestants": {
            name: {
                "documents_per_s": spread([count / value for value in seconds[name]]),
                "peak_mib": spread([cost[1] for cost in costs[name]]),
                **quality[name],
            }
            for name in runners
        },
        "unisono_over": {name: ratio(seconds[name], seconds["unisono"]) for name in runners if name != "unisono"},
    }


def growth(sizes: Sequence[int]) -> dict[str, Any]:
    """Seconds per document and peak memory of unisono alone, without the start of a process."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.jsonl"
        empty.write_text('{"text": "a"}\n')
        start_s = min(of_unisono(empty, Path(folder) / f"empty-{index}")[0][0] for index in range(3))
        for size in sizes:
            source = Path(folder) / "corpus.jsonl"
            corpus(source, size, size // 20)
            (wall_s, peak), _ = of_unisono(source, Path(folder) / str(size))
            found[f"{size:,}"] = {"us_per_document": (wall_s - start_s) / size * 1e6, "peak_mib": peak}
            print(f"{size:,} documents: {found[f'{size:,}']}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--documents", type=int, default=50_000)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    print(
        json.dumps({"together": side_by_side(arguments.rounds, arguments.documents), "growth": growth(arguments.sizes)})
    )


if __name__ == "__main__":
    main()
