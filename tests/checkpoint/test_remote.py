"""Copies of checkpoints at an address: the marker last, retention, failed and interrupted uploads, resuming from them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import tiny
import torch
from fsspec.implementations.local import LocalFileSystem
from states import Log, all_bits, make, mixed_state

from unisono.checkpoint import list_checkpoints, open_checkpoint
from unisono.checkpoint.options import CheckpointOptions
from unisono.checkpoint.remote import RemoteCheckpoints
from unisono.errors import CheckpointError

S3 = os.environ.get("UNISONO_S3_PYTHON")


class Unsteady(LocalFileSystem):
    """Local files whose uploads fail: the first ``failing`` shards, and every listing while ``down``."""

    protocol = "unsteady"
    failing = 0
    down = False
    order: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(path.removeprefix("unsteady://") if isinstance(path, str) else path)

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        if Unsteady.failing and "shard" in rpath:
            Unsteady.failing -= 1
            raise OSError("the network is gone")
        Unsteady.order.append(rpath.rsplit("/", 1)[-1])
        super().put_file(lpath, rpath, *args, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        Unsteady.order.append(path.rsplit("/", 1)[-1])
        super().pipe_file(path, value, **kwargs)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        if Unsteady.down:
            raise ConnectionError("no route")
        return super().ls(path, detail=detail, **kwargs)


@pytest.fixture(autouse=True)
def unsteady(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    monkeypatch.setattr("unisono.checkpoint.remote._PAUSE_S", 0.01)
    Unsteady.failing, Unsteady.down, Unsteady.order = 0, False, []
    yield
    Unsteady.failing, Unsteady.down = 0, False


def save(root: Path, address: str, *steps: int, log: Log | None = None, **options: Any) -> Log:
    log = log or Log()
    checkpointer = make(root, emit=log, upload_to=address, **options)
    for step in steps:
        checkpointer.save(step, mixed_state(step), {}, {"step": step})
        checkpointer.wait()
        checkpointer.finish_uploads()
    checkpointer.close()
    return log


def copies(folder: Path) -> dict[int, bool]:
    return {int(path.name[5:]): (path / "COMMIT").exists() for path in sorted(folder.iterdir())}


def fetch(root: Path, address: str, **options: Any) -> Log:
    log = Log()
    checkpointer = make(root, emit=log, upload_to=address)
    try:
        checkpointer.fetch_newest(**options)
    finally:
        checkpointer.close()
    return log


def steps(root: Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(root) if entry.state == "committed"]


def test_copies_have_their_marker_last_and_come_back_bit_by_bit(tmp_path: Path) -> None:
    far = tmp_path / "far"
    log = save(tmp_path / "here", f"unsteady://{far}", 5)
    assert Unsteady.order == ["shard-00000-of-00001.safetensors", "manifest.json", "COMMIT"]
    assert log.kinds == ["checkpoint_saved", "checkpoint_uploaded"]
    shutil.rmtree(tmp_path / "here")
    assert fetch(tmp_path / "here", f"unsteady://{far}").kinds == ["checkpoint_downloaded"]
    reader = open_checkpoint(tmp_path / "here" / "step-00000005")
    assert all_bits({name: reader.tensor(name) for name in reader.names()}) == all_bits(mixed_state(5))
    assert fetch(tmp_path / "here", f"unsteady://{far}").kinds == [], "it is here already"


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000-of-00001.safetensors", "COMMIT"])
def test_a_link_in_a_checkpoint_is_not_uploaded(tmp_path: Path, name: str) -> None:
    """Another user may own the folder of the run, and the link may lead to a private file."""
    save(tmp_path / "here", f"file://{tmp_path}/far", 5)
    here, far = tmp_path / "here/step-00000005", tmp_path / "again/step-00000005"
    (here / "more").write_text("of another user")
    RemoteCheckpoints(f"file://{tmp_path}/again").upload(here)
    assert sorted(path.name for path in far.iterdir()) == sorted({path.name for path in here.iterdir()} - {"more"})
    shutil.rmtree(far)
    (here / name).rename(tmp_path / "private")
    (here / name).symlink_to(tmp_path / "private")
    with pytest.raises(OSError, match="symbolic links"):
        RemoteCheckpoints(f"file://{tmp_path}/again").upload(here)
    assert not far.exists() or {path.name for path in far.iterdir()} <= {
        "manifest.json",
        "shard-00000-of-00001.safetensors",
    } - {name}


def test_any_filesystem_of_fsspec_will_do(tmp_path: Path) -> None:
    save(tmp_path / "here", "memory://runs/a", 1, 2)
    fetch(tmp_path / "there", "memory://runs/a")
    assert steps(tmp_path / "there") == [2]


def test_retention_is_that_of_the_folder(tmp_path: Path) -> None:
    far = tmp_path / "far"
    (far / "step-00000001").mkdir(parents=True)
    (far / "step-00000001" / "manifest.json").touch()  # an upload that was interrupted long ago
    save(tmp_path / "here", f"file://{far}", 10, 20, 30, 40, keep_last=2, keep_every_steps=20, keep_best=0)
    assert copies(far) == {20: True, 30: True, 40: True}
    assert steps(tmp_path / "here") == [20, 30, 40]


def test_a_failed_upload_is_said_and_made_up_for(tmp_path: Path) -> None:
    far = tmp_path / "far"
    Unsteady.failing = 1
    log = Log()
    checkpointer = make(tmp_path / "here", emit=log, upload_to=f"unsteady://{far}")
    checkpointer.save(5, mixed_state(), {}, {})
    checkpointer.wait()
    checkpointer.finish_uploads()
    checkpointer.close()
    assert log.kinds == ["checkpoint_saved", "checkpoint_upload_failed", "checkpoint_uploaded"]
    assert copies(far) == {5: True}


def test_a_run_whose_uploads_all_fail_ends_and_says_what_the_address_has(tmp_path: Path) -> None:
    far = tmp_path / "far"
    save(tmp_path / "here", f"unsteady://{far}", 5)
    Unsteady.failing = 100
    log = save(tmp_path / "here", f"unsteady://{far}", 6)
    assert log.kinds[:2] == ["checkpoint_saved", "checkpoint_upload_failed"]
    kind, fields = log.events[-1]
    assert kind == "checkpoint_upload_failed"
    assert fields == {
        "step": 6,
        "error": f"OSError: the network is gone; unsteady://{far}: its newest complete checkpoint is that of step 5",
    }
    assert steps(tmp_path / "here") == [5, 6]
    assert copies(far) == {5: True, 6: False}


def test_an_incomplete_or_damaged_copy_is_never_resumed_from(tmp_path: Path) -> None:
    far = tmp_path / "far"
    save(tmp_path / "here", f"file://{far}", 1, 2, 3)
    (far / "step-00000003" / "COMMIT").unlink()
    shard = far / "step-00000002" / "shard-00000-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    log = fetch(tmp_path / "there", f"file://{far}")
    assert log.kinds == ["checkpoint_quarantined", "checkpoint_downloaded"]
    assert steps(tmp_path / "there") == [1]


@pytest.mark.parametrize("lost", ["shard-00000-of-00001.safetensors", "manifest.json"])
def test_a_copy_that_lacks_a_file_is_damaged_and_the_one_before_it_is_taken(tmp_path: Path, lost: str) -> None:
    far = tmp_path / "far"
    save(tmp_path / "here", f"file://{far}", 1, 2, keep_last=3)
    (far / "step-00000002" / lost).unlink()
    log = fetch(tmp_path / "there", f"file://{far}")
    assert log.kinds == ["checkpoint_quarantined", "checkpoint_downloaded"]
    assert re.match(rf"a file of the copy is missing: .*{lost}", log.events[0][1]["reason"])
    assert steps(tmp_path / "there") == [1]
    further = save(tmp_path / "there", f"file://{far}", 3, keep_last=1, keep_best=0)
    assert not any("retention_problem" in fields for _, fields in further.events), "it can be deleted all the same"
    assert copies(far) == {3: True}


def own_folders(tmp_path: Path) -> dict[str, str]:
    """Addresses that lead to, into or above ``tmp_path/run/checkpoints``, by what they are called in the error."""
    root = tmp_path / "run" / "checkpoints"
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "run", target_is_directory=True)
    return {
        f"file://{root}": "the run's folder",
        f"file://{root}/": "the run's folder",
        f"local://{root}": "the run's folder",
        str(root): "the run's folder",
        "~/run/checkpoints": "the run's folder",
        "file://~/run/checkpoints": "the run's folder",
        f"file://{root}/../checkpoints": "the run's folder",
        f"file://{tmp_path}/link": "the run's folder",
        f"file://{tmp_path}/elsewhere/up/checkpoints": "the run's folder",
        f"simplecache::file://{root}": "the run's folder",
        f"unsteady://{root}": "the run's folder",  # whatever filesystem shows the same files
        f"file://{root}/copies": "a folder in the run's folder",
        f"file://{tmp_path}/link/not/there/yet": "a folder in the run's folder",
        f"file://{tmp_path}/run": "a folder above the run's folder",
        f"file://{tmp_path}/elsewhere/up": "a folder above the run's folder",
        "file:///": "a folder above the run's folder",
    }


def test_an_address_in_or_above_the_run_is_refused_and_its_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run" / "checkpoints"
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpointer = make(root)
    for step in (1, 2):
        checkpointer.save(step, mixed_state(step), {}, {})
    checkpointer.close()
    for address, where in own_folders(tmp_path).items():
        with pytest.raises(CheckpointError) as caught:
            make(root, upload_to=address)
        (problem,) = caught.value.problems
        assert problem.given == f"checkpoint.upload_to {address!r}, which is {where}, {root}", address
        assert problem.rule == "copies of checkpoints lie apart from the run that they are copies of"
        assert sorted(path.name for path in root.iterdir()) == ["step-00000001", "step-00000002"], address
        assert steps(root) == [1, 2], address
    save(root, f"file://{tmp_path}/run-2", 3, keep_last=3)
    assert steps(root) == [1, 2, 3]
    assert copies(tmp_path / "run-2") == {3: True}


def test_a_run_is_not_copied_into_its_own_folder(tmp_path: Path) -> None:
    for address in (f"file://{tmp_path}/run/checkpoints", f"file://{tmp_path}/run/copies"):
        with (
            pytest.raises(CheckpointError, match="lie apart from the run"),
            tiny.trainer(tmp_path / "run", every_steps=2, upload_to=address),
        ):
            raise AssertionError("it began")
    with tiny.trainer(tmp_path / "run", every_steps=2, upload_to=f"file://{tmp_path}/run-copies") as run:
        next(iter(run))
    assert copies(tmp_path / "run-copies") == {1: True}


def test_what_was_resumed_before_is_withdrawn(tmp_path: Path) -> None:
    far = tmp_path / "far"
    save(tmp_path / "here", f"file://{far}", 1, 2, 3)
    checkpointer = make(tmp_path / "here", upload_to=f"file://{far}")
    checkpointer.withdraw_after(1)
    checkpointer.close()
    assert copies(far) == {1: True, 2: False, 3: False}


def test_an_address_that_cannot_be_read_starts_nothing(tmp_path: Path) -> None:
    Unsteady.down = True
    with pytest.raises(CheckpointError) as caught:
        fetch(tmp_path / "here", "unsteady:///far")
    assert str(caught.value) == (
        "checkpoint.upload_to unsteady:///far: ConnectionError: no route\n"
        "  rule: a run resumes from the newest checkpoint, in its folder or at this address\n"
        "  so:   nothing was loaded, and no new run was begun\n"
        "  try:  the address, its credentials in the environment and the network; without checkpoint.upload_to the run "
        "continues from its folder"
    )


def test_never_refuses_an_address_with_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "here", f"file://{tmp_path / 'far'}", 4)
    with pytest.raises(CheckpointError, match=r"resume 'never' with checkpoint.upload_to .* up to step 4"):
        fetch(tmp_path / "there", f"file://{tmp_path / 'far'}", allowed=False)
    assert steps(tmp_path / "there") == []


def test_addresses_that_are_none(tmp_path: Path) -> None:
    ((name, problem),) = CheckpointOptions(upload_to="backup").problems()
    assert (name, problem.rule) == ("upload_to", "an address names its filesystem, as s3://bucket/folder does")
    with pytest.raises(CheckpointError, match="an address begins with the name of a filesystem"):
        make(tmp_path, upload_to="nosuch://a")


@pytest.mark.parametrize("name", ["GS", "HDFS"])
def test_checkpoints_at_another_filesystem(tmp_path: Path, name: str) -> None:
    address = os.environ.get(f"UNISONO_{name}_ADDRESS")
    if not address:
        pytest.skip(f"set UNISONO_{name}_ADDRESS to an empty folder: nothing was uploaded")
    save(tmp_path / "here", address, 1, 2, 3, keep_last=2, keep_best=0)
    fetch(tmp_path / "there", address)
    assert steps(tmp_path / "there") == [3]


KILLED = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
import fsspec
from fsspec.implementations.local import LocalFileSystem
from states import make, mixed_state
from pathlib import Path
put = LocalFileSystem.put_file
def deadly(self, lpath, rpath, *args, **kwargs):
    put(self, lpath, rpath, *args, **kwargs)
    if "step-00000002" in rpath:
        os.kill(os.getpid(), signal.SIGKILL)
LocalFileSystem.put_file = deadly
checkpointer = make(Path(sys.argv[2]), upload_to=sys.argv[3])
for step in (1, 2):
    checkpointer.save(step, mixed_state(step), {}, {})
    checkpointer.wait()
    checkpointer.finish_uploads()
"""


@pytest.mark.full
def test_a_process_that_is_killed_while_it_uploads_leaves_the_copy_before(tmp_path: Path) -> None:
    far = tmp_path / "far"
    folder = next(path for path in sys.path if (Path(path) / "states.py").exists())
    run = subprocess.run(
        [sys.executable, "-c", KILLED, folder, str(tmp_path / "here"), f"file://{far}"], timeout=120, check=False
    )
    assert run.returncode == -9
    assert copies(far) == {1: True, 2: False}
    fetch(tmp_path / "there", f"file://{far}")
    assert steps(tmp_path / "there") == [1]
    save(tmp_path / "here", f"file://{far}", 3, keep_last=2, keep_best=0)
    assert copies(far) == {1: True, 3: True}, "the rest of the interrupted upload is gone"


@pytest.mark.full
def test_a_run_goes_on_from_the_address_on_a_machine_without_its_folder(tmp_path: Path) -> None:
    far = tmp_path / "far"

    def interrupted(folder: str, stop: int, **changes: Any) -> str:
        with tiny.trainer(tmp_path / folder, **changes) as run:
            for step in run:
                if step.index == stop:
                    break
            return tiny.digest(run)

    whole = interrupted("whole", 8)
    interrupted("one", 5, every_steps=2, upload_to=f"file://{far}")
    assert max(copies(far)) in (4, 5)
    assert interrupted("two", 8, every_steps=2, upload_to=f"file://{far}") == whole
    assert steps(tmp_path / "two" / "checkpoints")[-1] == 8
    assert copies(far)[8]


SERVER = """
import json, os, sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
endpoint = "http://%s:%d" % server.get_host_and_port()
os.environ["AWS_ENDPOINT_URL"] = endpoint
import s3fs
s3fs.S3FileSystem().mkdir("bucket")
print(endpoint, flush=True)
sys.stdin.read()
"""

CLIENT = """
import sys
sys.path[:0] = sys.argv[1:3]
sys.path.append(sys.argv[3])
from pathlib import Path
import s3fs
import test_remote as tests
here = Path(sys.argv[4])
address = "s3://bucket/runs/a"
tests.save(here / "here", address, 1, 2, 3, keep_last=2, keep_best=0)
s3 = s3fs.S3FileSystem()
names = sorted(name.removeprefix("bucket/runs/a/") for name in s3.find("bucket/runs/a"))
assert [name for name in names if name.endswith("COMMIT")] == ["step-00000002/COMMIT", "step-00000003/COMMIT"], names
assert not any("step-00000001" in name for name in names), names
s3.rm_file("bucket/runs/a/step-00000003/COMMIT")
assert tests.fetch(here / "there", address).kinds == ["checkpoint_downloaded"]
assert tests.steps(here / "there") == [2]
print("resumed")
"""


@pytest.mark.peer
@pytest.mark.skipif(not S3, reason="set UNISONO_S3_PYTHON to an interpreter with s3fs and moto: nothing was uploaded")
def test_checkpoints_at_an_s3_server(tmp_path: Path) -> None:
    assert S3 is not None
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    server = subprocess.Popen(
        [S3, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | keys
    )
    try:
        assert server.stdout is not None
        keys["AWS_ENDPOINT_URL"] = next(line.strip() for line in server.stdout if line.startswith("http"))
        folders = [str(Path(__file__).parent), next(path for path in sys.path if (Path(path) / "states.py").exists())]
        libraries = str(Path(torch.__file__).parents[1])
        run = subprocess.run(
            [S3, "-c", CLIENT, *folders, libraries, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=os.environ | keys | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == "resumed"
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("file", ["manifest.json", "COMMIT", "shard-00000-of-00001.safetensors"])
def test_a_copy_with_a_file_of_another_size_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    far = tmp_path / "far"
    save(tmp_path / "here", f"file://{far}", 1, 2, keep_last=3)
    monkeypatch.setattr("unisono.checkpoint.remote.MAX_JSON_BYTES", 1 << 20)
    os.truncate(far / "step-00000002" / file, 1 << 40)  # sparse: it takes no space, and its copy would
    log = fetch(tmp_path / "there", f"file://{far}")
    assert log.kinds == ["checkpoint_quarantined", "checkpoint_downloaded"]
    assert re.search("has more than 1,048,576 bytes|has another size than", log.events[0][1]["reason"])
    assert steps(tmp_path / "there") == [1]
