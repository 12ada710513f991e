"""Near-duplicates by rensa's deduplicator: ``python rensa_alone.py CORPUS OUT``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from rensa import RMinHashDeduplicator

source, out = map(Path, sys.argv[1:])
pairs = []
for line in source.open():
    row = json.loads(line)
    words = re.findall(r"\w+", row["text"].lower())
    pairs.append((str(row["id"]), [" ".join(words[at : at + 5]) for at in range(max(1, len(words) - 4))]))
deduplicator = RMinHashDeduplicator(threshold=0.8, num_perm=128, use_lsh=True)
kept = deduplicator.add_pairs(pairs)
out.mkdir()
(out / "dropped.json").write_text(
    json.dumps([int(name) for (name, _), keep in zip(pairs, kept, strict=True) if not keep])
)
