"""Make chunks of documents for a job: ``python -m unisono.quality.chunk_worker RECIPE CONTAMINATION DESCRIPTOR``.

RECIPE is JSON, CONTAMINATION an .npy file. A request is a list of texts in MessagePack, the answer a chunk file.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from unisono.data.loading.subprocess_map import serve_requests
from unisono.quality.chunks import make_chunk
from unisono.quality.options import CleanRecipe


def _main(settings: str, hashes: str, descriptor: str) -> None:
    recipe = msgspec.json.decode(settings, type=CleanRecipe)
    contamination = np.load(hashes, mmap_mode="r", allow_pickle=False)

    def answer(request: bytes) -> bytes:
        return make_chunk(msgspec.msgpack.decode(request, type=list[bytes | None]), recipe, contamination)

    serve_requests(Connection(int(descriptor)), answer)


if __name__ == "__main__":
    _main(*sys.argv[1:])
