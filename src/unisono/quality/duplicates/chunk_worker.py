"""Make chunks of documents for a job: ``python -m unisono.quality.duplicates.chunk_worker RECIPE HASHES DESCRIPTOR``.

RECIPE is JSON, HASHES an .npy file of the benchmarks' n-grams. The requests are those of ``chunks.encode_request``, the answers
chunk files.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from unisono.data.loading.subprocess_map import serve_requests
from unisono.quality.duplicates.chunks import answer_request
from unisono.quality.options import CleanRecipe


def _main(settings: str, hashes: str, descriptor: str) -> None:
    recipe = msgspec.json.decode(settings, type=CleanRecipe)
    benchmark_hashes = np.load(hashes, mmap_mode="r", allow_pickle=False)
    serve_requests(Connection(int(descriptor)), lambda request: answer_request(request, recipe, benchmark_hashes))


if __name__ == "__main__":
    _main(*sys.argv[1:])
