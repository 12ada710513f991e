"""Make chunks of documents for a job: ``python -m unisono.quality.chunk_worker RECIPE CONTAMINATION DESCRIPTOR``.

RECIPE is JSON, CONTAMINATION an .npy file. A request is MessagePack: a list of texts or images, and of images one of their
suffixes. The answer is a chunk file.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from unisono.data.loading.subprocess_map import serve_requests
from unisono.quality.chunks import make_chunk, make_image_chunk
from unisono.quality.options import CleanRecipe


def _main(settings: str, hashes: str, descriptor: str) -> None:
    recipe = msgspec.json.decode(settings, type=CleanRecipe)
    contamination = np.load(hashes, mmap_mode="r", allow_pickle=False)

    def answer(request: bytes) -> bytes:
        contents, suffixes = msgspec.msgpack.decode(request, type=tuple[list[bytes | None], list[str] | None])
        if suffixes is not None:
            return make_image_chunk(contents, suffixes, recipe)
        return make_chunk(contents, recipe, contamination)

    serve_requests(Connection(int(descriptor)), answer)


if __name__ == "__main__":
    _main(*sys.argv[1:])
