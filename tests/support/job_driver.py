"""Runs a job in a process of its own: ``python job_driver.py JOB_JSON RUN_DIR``, with server and worker scripts of the test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from unisono.errors import UnisonoError
from unisono.launch import LaunchOptions
from unisono.launch.hostfile import Host
from unisono.launch.job import run_job
from unisono.launch.process_layout import JobLayout, assign_processes

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    hosts = tuple(Host(**host) for host in asked["hosts"])
    try:
        job = JobLayout(
            command=(sys.executable, asked["worker"]),
            server_command=(sys.executable, asked["server"]),
            hosts=hosts,
            slots=assign_processes(hosts, None, asked["servers"]),
            run_id="test",
            options=LaunchOptions(**asked["options"]),
            environ=asked["environ"],
            port=asked["port"],
        )
        code = run_job(job, Path(sys.argv[2]))
    except UnisonoError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    assert "torch" not in sys.modules
    sys.exit(code)
