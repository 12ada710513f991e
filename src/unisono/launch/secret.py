"""The job's secret: 32 random bytes shared by all processes of a job with servers.

It is passed by an inherited pipe (``UNISONO_SECRET_FD`` is its descriptor), never in an argument vector or an environment
value, which other users and tools can see.
"""

from __future__ import annotations

import os
import secrets

SECRET_BYTES = 32


def new_secret() -> bytes:
    """A new random secret."""
    return secrets.token_bytes(SECRET_BYTES)


def secret_pipe(secret: bytes) -> int:
    """A descriptor from which one process reads ``secret`` once. The caller closes its own copy."""
    reader, writer = os.pipe()
    os.write(writer, secret)  # far less than a pipe holds, so this never waits
    os.close(writer)
    return reader
