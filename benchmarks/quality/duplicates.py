"""Near-duplicates removed from one corpus by unisono, by rensa alone, by text-dedup and by datatrove; unisono's cost by size.

    python -m benchmarks.quality.duplicates [--rounds 7] [--documents 20000] [--sizes 10000 ...] [--cache DIR]

Each contestant is a whole command with one process for the work: it reads the same JSONL and writes which rows it keeps, or the
rows. Start-up counts. All compare sets of five words, from a similarity of 0.8 on, with 128 hashes (datatrove: its own 14 x 8).
Recall is over planted copies whose similarity, computed from the words, is 0.8 or more; precision over rows that are dropped.

rensa alone is a script as its page shows it: strings of n-grams made in Python, and its deduplicator. datatrove's tokenizer for
English needs a download; it splits at spaces here, which is faster.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.quality.commands import of_script, of_unisono, side_by_side

NEAR = 0.8
WORDS = 230  # of a document, on average: 1.4 KB
COPIES = 20  # one of so many documents is a copy


def write_corpus(path: Path, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Write rows of random words, and copies with a few words replaced; returns the near pairs."""
    draw = random.Random(seed)
    vocabulary = [f"w{number:x}" * (1 + number % 3) for number in range(20_000)]
    weights = list(accumulate(1 / (rank + 5) for rank in range(len(vocabulary))))
    originals: list[list[str]] = []
    near: list[tuple[int, int]] = []
    with path.open("w") as file:
        for number in range(count):
            copied = number - (count - count // COPIES)
            if copied >= 0:
                words = list(originals[copied])
                for place in draw.sample(range(len(words)), draw.randrange(1, 8)):
                    words[place] = f"new{draw.randrange(1 << 30)}"
                if similarity(words, originals[copied]) >= NEAR:
                    near.append((copied, number))
            else:
                words = draw.choices(vocabulary, cum_weights=weights, k=draw.randrange(WORDS // 2, WORDS * 3 // 2))
                if number < count // COPIES:
                    originals.append(words)
            file.write(json.dumps({"id": number, "text": " ".join(words)}) + "\n")
    return near


def similarity(first: Sequence[str], second: Sequence[str]) -> float:
    """Jaccard similarity of the sets of five words."""
    a, b = (set(zip(*(words[begin:] for begin in range(5)), strict=False)) for words in (first, second))
    return len(a & b) / len(a | b)


def contest(rounds: int, count: int, cache: Path) -> dict[str, Any]:
    commands = {
        "unisono": of_unisono,
        "rensa alone": of_script("", "benchmarks.quality.rensa_alone", cache),
        "text-dedup": of_script("text_dedup", "benchmarks.quality.text_dedup_alone", cache),
        "datatrove": of_script("datatrove", "benchmarks.quality.datatrove_alone", cache),
    }
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "corpus.jsonl"
        planted = {"near": write_corpus(source, count)}
        return side_by_side(commands, source, Path(folder), planted, rounds=rounds, count=count)


def growth(sizes: Sequence[int]) -> dict[str, Any]:
    """Seconds per document and peak memory of unisono alone, less what a corpus of one document takes."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "corpus.jsonl"
        source.write_text('{"text": "a"}\n')
        start_s = min(of_unisono(source, folder / f"one-{index}").wall_s for index in range(3))
        for size in sizes:
            write_corpus(source, size)
            outcome = of_unisono(source, folder / str(size))
            cost_us = (outcome.wall_s - start_s) / size * 1e6
            found[f"{size:,} documents"] = {"us_per_document": cost_us, "peak_mib": outcome.peak_mib}
            print(f"{size:,} documents: {cost_us:.1f} us each, {outcome.peak_mib:.0f} MiB", file=sys.stderr)
    costs = [row["us_per_document"] for row in found.values()]
    return {"sizes": found, "largest_over_smallest": costs[-1] / costs[0] if costs else 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    arguments = parser.parse_args()
    together = contest(arguments.rounds, arguments.documents, arguments.cache)
    print(json.dumps({"together": together, "growth": growth(arguments.sizes)}))


if __name__ == "__main__":
    main()
