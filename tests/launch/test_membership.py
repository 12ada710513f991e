"""Files by which workers join a job, and a second launch in the folder of a running one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.errors import ConfigError, LaunchError
from unisono.launch import LaunchOptions
from unisono.launch.job import run_job, with_servers
from unisono.launch.membership import claim_ranks, open_to_workers, read_membership
from unisono.launch.supervise import job_folder

SERVERS = ["127.0.0.1:1"]


def test_a_refused_second_launch_leaves_the_files_of_the_first(tmp_path: Path) -> None:
    job = replace(with_servers(["true"], LaunchOptions(num_processes=1, num_servers=1), tmp_path), elastic=True)
    snapshot = tmp_path / "servers" / "1f" / "server-0" / "state.json"
    with job_folder(tmp_path), open_to_workers(tmp_path, "first", 1, SERVERS, bytes(32)):
        snapshot.parent.mkdir(parents=True)
        snapshot.write_text("{}")
        assert claim_ranks(read_membership(tmp_path), 1, None) == [1]
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConfigError, match=r"in which process \d+ on .* is running a job"):
            run_job(job, tmp_path)
        assert sorted(tmp_path.rglob("*")) == before
        assert read_membership(tmp_path).run_id == "first"


def test_claims_are_not_written_or_deleted_through_a_link(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "job"
    precious.mkdir()
    folder.mkdir()
    (precious / "rank-3").write_text("mine")
    (folder / "joined").symlink_to(precious)
    with pytest.raises(LaunchError, match="cannot be written"), open_to_workers(folder, "r", 1, SERVERS, bytes(32)):
        pass
    (folder / "joined").unlink()
    with open_to_workers(folder, "r", 1, SERVERS, bytes(32)):
        (folder / "joined").rmdir()
        (folder / "joined").symlink_to(precious)
        with pytest.raises(LaunchError, match="cannot be written"):
            claim_ranks(read_membership(folder), 1, None)
    assert [path.name for path in precious.iterdir()] == ["rank-3"]


def test_only_claims_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "joined").mkdir()
    for name in ("rank-3", "rank-sheet.ods"):
        (tmp_path / "joined" / name).touch()
    with open_to_workers(tmp_path, "r", 1, SERVERS, bytes(32)):
        assert [path.name for path in (tmp_path / "joined").iterdir()] == ["rank-sheet.ods"]


@pytest.mark.parametrize("planted", ["a pipe", "of another user", "for others to write", "no number"])
def test_a_record_that_another_user_can_have_written_is_not_joined(tmp_path: Path, planted: str) -> None:
    with open_to_workers(tmp_path, "r", 1, SERVERS, bytes(32)):
        record = tmp_path / "join.json"
        if planted == "a pipe":
            record.unlink()
            os.mkfifo(record)
        elif planted == "no number":
            record.write_text(record.read_text().replace('"world_size": 1', '"world_size": 1e999'))
        elif planted == "for others to write":
            record.chmod(0o666)
        elif os.geteuid() == 0:
            os.chown(record, 65534, 65534)
        else:
            pytest.skip("only root can give a file away")
        with pytest.raises(LaunchError, match=r"join\.json cannot be read"):
            read_membership(tmp_path)
