"""``python known_secret.py FILE ARGUMENTS…``: ``unisono ARGUMENTS`` whose job has the secret in FILE, for a test to look for."""

from __future__ import annotations

import sys
from pathlib import Path

from unisono.cli.main import entry
from unisono.kvstore.server import child_servers
from unisono.launch import multi_host_job

if __name__ == "__main__":
    secret = Path(sys.argv.pop(1)).read_bytes()
    multi_host_job.new_secret = lambda: secret
    child_servers.job_secret = lambda job, environ: secret
    entry()
