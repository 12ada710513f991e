"""The job's secret: 32 random bytes that every process of a job with servers gets, and nobody else can read.

It travels by an inherited pipe (``UNISONO_SECRET_FD`` names the descriptor), never in an argument vector or an environment
value, which other users and other tools can see.
"""

from __future__ import annotations

import os
import secrets

SECRET_BYTES = 32


def new_secret() -> bytes:
    """A secret for one job."""
    return secrets.token_bytes(SECRET_BYTES)


def secret_pipe(secret: bytes) -> int:
    """A descriptor from which one process reads ``secret`` once, to its end; the caller closes its own copy."""
    reader, writer = os.pipe()
    os.write(writer, secret)  # far less than a pipe holds, so this never waits
    os.close(writer)
    return reader
