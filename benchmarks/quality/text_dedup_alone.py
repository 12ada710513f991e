"""Near-duplicates by text-dedup's command: ``python -m benchmarks.quality.text_dedup_alone CORPUS OUT``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from datasets import load_from_disk

OPTIONS = (
    *("--path", "json", "--split", "train", "--column", "text", "--batch_size", "10000"),
    *("--num_perm", "128", "--ngram", "5", "--threshold", "0.8", "--min_length", "0", "--num_proc", "1"),
)

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    out.mkdir()
    places = ["--data_files", str(source), "--cache_dir", str(out / "cache"), "--output", str(out / "kept")]
    subprocess.run([sys.executable, "-m", "text_dedup.minhash", *OPTIONS, *places], check=True, cwd=out)
    kept = set(load_from_disk(str(out / "kept"))["id"])
    rows = [json.loads(line)["id"] for line in source.open()]
    (out / "dropped.json").write_text(json.dumps([row for row in rows if row not in kept]))
