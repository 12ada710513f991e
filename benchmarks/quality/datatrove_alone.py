"""Near-duplicates by datatrove's four stages: ``python datatrove_alone.py CORPUS OUT``."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.hashing import HashConfig


class Spaces:
    """A tokenizer that needs no download."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


source, out = map(Path, sys.argv[1:])
out.mkdir()
config = MinhashConfig(hash_config=HashConfig(precision=64), n_grams=5, num_buckets=14, hashes_per_bucket=8)


def reader() -> JsonlReader:
    return JsonlReader(str(source.parent), glob_pattern=source.name)


signatures = MinhashDedupSignature(output_folder=str(out / "signatures"), config=config)
signatures.word_tokenizer = Spaces()
stages = [
    (1, [reader(), signatures]),
    (14, [MinhashDedupBuckets(str(out / "signatures"), str(out / "buckets"), config=config)]),
    (1, [MinhashDedupCluster(str(out / "buckets"), str(out / "remove"), config=config)]),
    (1, [reader(), MinhashDedupFilter(str(out / "remove")), JsonlWriter(str(out / "kept"))]),
]
for number, (tasks, pipeline) in enumerate(stages):
    LocalPipelineExecutor(pipeline=pipeline, tasks=tasks, workers=1, logging_dir=str(out / "logs" / str(number))).run()
kept = set()
for path in (out / "kept").iterdir():
    with gzip.open(path, "rt") as file:
        kept |= {int(json.loads(line)["id"]) for line in file}
ids = [json.loads(line)["id"] for line in source.open()]
(out / "dropped.json").write_text(json.dumps([name for name in ids if name not in kept]))
