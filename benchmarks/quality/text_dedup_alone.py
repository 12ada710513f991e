"""Near-duplicates by text-dedup's command: ``python text_dedup_alone.py CORPUS OUT``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from datasets import load_from_disk

source, out = map(Path, sys.argv[1:])
out.mkdir()
command = [
    sys.executable,
    "-m",
    "text_dedup.minhash",
    "--path",
    "json",
    "--data_files",
    str(source),
    "--split",
    "train",
]
command += [
    "--cache_dir",
    str(out / "cache"),
    "--output",
    str(out / "kept"),
    "--column",
    "text",
    "--batch_size",
    "10000",
]
command += ["--num_perm", "128", "--ngram", "5", "--threshold", "0.8", "--num_proc", "1", "--min_length", "0"]
subprocess.run(command, check=True, cwd=out)
kept = set(load_from_disk(str(out / "kept"))["id"])
ids = [json.loads(line)["id"] for line in source.open()]
(out / "dropped.json").write_text(json.dumps([name for name in ids if name not in kept]))
