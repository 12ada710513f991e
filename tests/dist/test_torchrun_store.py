"""torchrun's own store is open to everyone: what it costs a job if another user changes the one value that is read from it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from intruder import NOBODY, as_another_user, change_the_place_of_rank_0, needs_another_user
from procs import wait_until

RANK = """
import json, os, sys, time
from pathlib import Path
from unisono.dist import job_from_environ, join_world
from unisono.errors import CommError
job, folder = job_from_environ(os.environ), Path(sys.argv[1])
if job.rank == 0:
    (folder / "port.new").write_text(json.dumps([job.master_port, job.run_id, job.shared_store]))
    os.rename(folder / "port.new", folder / "port")
else:
    while not (folder / "changed").exists():
        time.sleep(0.05)
try:
    world = join_world(job, device_type="cpu", timeout_s=20, meet_timeout_s=float(sys.argv[2]) if job.rank == 0 else 4)
    said = f"joined with {world.world_size} ranks"
    world.close()
except CommError as error:
    said = str(error)
(folder / f"said-{job.rank}").write_text(said)
# torchrun ends the others with the first that fails
while not all((folder / f"said-{rank}").exists() for rank in range(2)):
    time.sleep(0.05)
sys.exit(0 if said.startswith("joined") else 1)
"""


@contextmanager
def torchrun(folder: Path, meet_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Two ranks, the second of which joins once there is a file ``changed``."""
    (folder / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = os.environ | {
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(
            [*command, str(folder / "rank.py"), str(folder), str(meet_s)],
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        os.killpg(started.pid, signal.SIGTERM) if started.poll() is None else None
        started.wait()


@pytest.mark.full
@needs_another_user
def test_a_changed_place_of_rank_0_ends_the_job_with_an_error(tmp_path: Path) -> None:
    results: list[dict[str, Any]] = []
    held, release = os.pipe()
    ready, has_changed = os.pipe()

    def attack(*args: Any) -> Any:
        os.close(release)
        return change_the_place_of_rank_0(*args)

    with torchrun(tmp_path, meet_s=12) as started:
        wait_until((tmp_path / "port").exists, "rank 0 has begun", 120)
        port, run_id, shared_store = json.loads((tmp_path / "port").read_text())
        assert shared_store
        thread = threading.Thread(
            target=lambda: results.append(as_another_user(attack, port, run_id, held, has_changed))
        )
        thread.start()
        try:
            assert select.select([ready], [], [], 60)[0], "the value is changed"
            (tmp_path / "changed").touch()
            code = started.wait(120)
        finally:
            os.close(release)
            thread.join()
            for fd in (held, ready, has_changed):
                os.close(fd)
    assert code != 0, results
    first, second = ((tmp_path / f"said-{rank}").read_text() for rank in range(2))
    assert first.startswith("rank 1 of 2 did not arrive within 12 s (seen from rank 0)")
    assert second.startswith("rank 1 of 2 found no rank 0 at 127.0.0.1:")
    assert "(what listens there has no proof that it holds the job's secret)" in second
    assert "so:   this rank cannot join and has not trained" in second
    (attacker,) = results
    assert attacker["uid"] == NOBODY
    assert attacker["before"].startswith("127.0.0.1:")
    # it heard a rank's name and a proof, each time, and not the secret
    heard = [bytes.fromhex(text) for text in attacker["heard"]]
    assert any(b"rank 1" in text for text in heard)
    secret = (tmp_path / ".config/unisono/secret").read_bytes()
    assert len(secret) == 32
    assert all(secret not in text and len(text) < 400 for text in heard)


@pytest.mark.full
def test_the_same_job_joins_where_nobody_changes_it(tmp_path: Path) -> None:
    (tmp_path / "changed").touch()
    with torchrun(tmp_path, meet_s=60) as started:
        assert started.wait(120) == 0, (tmp_path / "log").read_text()
    assert {(tmp_path / f"said-{rank}").read_text() for rank in range(2)} == {"joined with 2 ranks"}
