"""Milliseconds to open a large record file and read one record in its middle, in this fresh process and again. One line of JSON.

Imports are done before. Settings: kind, path, count.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def unisono(path: str) -> Callable[[], Any]:
    """A RecordFile of ours."""
    from unisono.data.recordio import RecordFile

    return lambda: RecordFile(path).read


def mxnet(path: str) -> Callable[[], Any]:
    """MXIndexedRecordIO parses the text index."""
    import mxnet as package

    index = path.removesuffix(".rec") + ".idx"
    return lambda: package.recordio.MXIndexedRecordIO(index, path, "r").read_idx


def main() -> None:
    settings = json.loads(sys.argv[1])
    make = {"unisono": unisono, "mxnet": mxnet}[settings["kind"]](settings["path"])
    times: list[float] = []
    middle = settings["count"] // 2
    for _ in range(2):
        begin = time.perf_counter()
        payload = make()(middle)
        times.append(1e3 * (time.perf_counter() - begin))
        assert int.from_bytes(payload, "little") == middle
    print(json.dumps({"fresh_ms": times[0], "again_ms": times[1]}))


if __name__ == "__main__":
    main()
