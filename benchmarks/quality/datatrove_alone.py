"""Near-duplicates by datatrove's four stages: ``python -m benchmarks.quality.datatrove_alone CORPUS OUT``."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature, minhash
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.hashing import HashConfig

BUCKETS, ROWS = 14, 8  # its defaults


class Spaces:
    """A tokenizer that needs no download."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


def main(source: Path, out: Path) -> None:
    out.mkdir()
    config = MinhashConfig(hash_config=HashConfig(precision=64), n_grams=5, num_buckets=BUCKETS, hashes_per_bucket=ROWS)
    minhash.load_word_tokenizer = lambda language: Spaces()
    signatures = MinhashDedupSignature(output_folder=str(out / "signatures"), config=config)
    buckets = MinhashDedupBuckets(str(out / "signatures"), str(out / "buckets"), config=config)
    cluster = MinhashDedupCluster(str(out / "buckets"), str(out / "remove"), config=config)
    stages = [
        (1, [_reader(source), signatures]),
        (BUCKETS, [buckets]),
        (1, [cluster]),
        (1, [_reader(source), MinhashDedupFilter(str(out / "remove")), JsonlWriter(str(out / "kept"))]),
    ]
    for number, (tasks, pipeline) in enumerate(stages):
        LocalPipelineExecutor(
            pipeline=pipeline, tasks=tasks, workers=1, logging_dir=str(out / "logs" / str(number))
        ).run()
    kept: set[int] = set()
    for path in (out / "kept").iterdir():
        with gzip.open(path, "rt") as file:
            kept |= {int(json.loads(line).get("id", 0)) for line in file}  # it leaves out a 0
    rows = [json.loads(line)["id"] for line in source.open()]
    (out / "dropped.json").write_text(json.dumps([row for row in rows if row not in kept]))


def _reader(source: Path) -> JsonlReader:
    return JsonlReader(str(source.parent), glob_pattern=source.name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
