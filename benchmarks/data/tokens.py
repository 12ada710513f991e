"""Tokens per second to training batches, unisono and every loader that could be installed. Prints JSON.

    python -m benchmarks.data.tokens [--rounds 15] [--steps 600] [--only WORD,WORD] [--cache DIR]

50 million uint16 tokens in the page cache; batches of 16 windows of 1,024 inputs and targets. Each contestant is a process;
a block is ``--steps`` batches and at least half a second. Most read windows side by side, whose floor is ``floor rows``;
nanoGPT and unisono's windows of stride 1 (``unisono sliding``) begin at any token, whose floor is ``floor sliding``.

``unisono loader mask`` has the default options, and has finished its tuning before it is measured; a number asks for that many
threads. ``claims`` are the times of torch's DataLoader, which makes no masks, over those of our default; the aim is 1 or more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.contestants import Contestant
from benchmarks.data.contest import chosen, contest
from benchmarks.paired import ratio

from unisono.data import PackedWindows, TokenWriter, open_tokens, pack_tokens

BATCH, LENGTH, TOKENS = 16, 1024, 50_000_000
KINDS = {
    "floor rows": "",
    "floor sliding": "",
    "unisono windows ignore": "",
    "unisono windows mask": "",
    "unisono sliding ignore": "",
    "unisono sliding mask": "",
    "unisono loader ignore 0": "",
    "unisono loader mask": "",
    "unisono loader mask 0": "",
    "unisono loader mask 1": "",
    "torch 0": "",
    "torch 1": "",
    "torch 2": "",
    "nanogpt": "",
    "litdata 0": "litdata",
    "litdata 2": "litdata",
    "mds local": "streaming",
    "mds streaming": "streaming",
    "mxnet": "mxnet",
    "grain": "grain",
    "mindspore": "mindspore",
    "megatron 0": "megatron",
    "megatron 2": "megatron",
}


def write(folder: Path, count: int) -> Path:
    """Documents of 100 to 4,000 tokens, as one shard."""
    rng = np.random.default_rng(0)
    with TokenWriter(folder, "bench", vocab_size=50_257, end_of_document=50_256) as writer:
        written = 0
        while written < count:
            size = int(rng.integers(100, 4000))
            writer.add(rng.integers(0, 50_000, size), np.ones(size))
            written += size + 1
    (path,) = writer.paths
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=600, help="batches per block")
    parser.add_argument("--only", default="", help="contestants whose names have one of these words")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/unisono-bench").expanduser())
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        path = write(Path(folder), arguments.tokens)
        contestants = [
            Contestant(
                name=name,
                module="benchmarks.data.peers.tokens",
                environment=home,
                settings={"kind": name, "tokens": str(path)},
            )
            for name, home in KINDS.items()
        ]
        tokens = open_tokens([path])
        pack_tokens(tokens, LENGTH)
        packing = asdict(PackedWindows(tokens, seq_len=LENGTH).stats)
        outcome: dict[str, Any] = contest(
            chosen(contestants, arguments.only),
            "unisono loader ignore 0",
            rounds=arguments.rounds,
            steps=arguments.steps,
            block_s=0.5,
            cache=arguments.cache,
        )
    rows = outcome["contestants"]
    outcome["claims"] = {
        f"{name} over unisono loader mask": ratio(rows[name]["round_s"], rows["unisono loader mask"]["round_s"])
        for name in ("torch 0", "torch 1")
        if rows.keys() >= {name, "unisono loader mask"}
    }
    for row in rows.values():
        del row["values"]
        row["million_tokens_per_s"] = round(arguments.steps * BATCH * LENGTH / row["block_s"] / 1e6, 1)
    print(json.dumps({**outcome, "packing": packing, "rounds": arguments.rounds, "steps": arguments.steps}, indent=1))


if __name__ == "__main__":
    main()
