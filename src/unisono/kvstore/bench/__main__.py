"""``python -m unisono.kvstore.bench worker``: a process that ``processes`` starts. Its settings are a line of its
input."""

from __future__ import annotations

import json
import os
import sys

from unisono.dist import job_from_environ
from unisono.errors import UnisonoError
from unisono.kvstore.bench.settings import BenchSettings
from unisono.kvstore.server.child_servers import exit_with_parent


def main() -> int:
    settings = BenchSettings.from_json(json.loads(_line()))
    exit_with_parent()
    from unisono.kvstore.bench.measure import join_and_measure

    try:
        found = join_and_measure(job_from_environ(os.environ), settings)
    except UnisonoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if found is not None:
        print(json.dumps(found), flush=True)
    return 0


def _line() -> str:
    """One line of standard input, read byte by byte so that nothing after it is consumed."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


if __name__ == "__main__":
    sys.exit(main())
