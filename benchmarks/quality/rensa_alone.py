"""Near-duplicates by rensa's deduplicator: ``python -m benchmarks.quality.rensa_alone CORPUS OUT``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from rensa import RMinHashDeduplicator

NGRAM = 5

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    pairs: list[tuple[str, list[str]]] = []
    for line in source.open():
        row = json.loads(line)
        words = re.findall(r"\w+", row["text"].lower())
        shingles = [" ".join(words[at : at + NGRAM]) for at in range(max(1, len(words) - NGRAM + 1))]
        pairs.append((str(row["id"]), shingles))
    deduplicator = RMinHashDeduplicator(threshold=0.8, num_perm=128, use_lsh=True)
    is_kept = deduplicator.add_pairs(pairs)
    out.mkdir()
    dropped = [int(name) for (name, _), keep in zip(pairs, is_kept, strict=True) if not keep]
    (out / "dropped.json").write_text(json.dumps(dropped))
