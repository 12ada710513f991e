"""A folder TARGET.part that another user planted, or that no packing job made, moves, overwrites and deletes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.data.convert.pack import PackOptions, pack_images
from unisono.errors import DataError


@pytest.fixture
def interrupted(album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job that was killed before its first file had its name."""
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if self.parent.parent.suffix == ".part" and target.parent == tmp_path:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", failing)
        with pytest.raises(KeyboardInterrupt):
            pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3))
    return tmp_path / "b.rec.part"


def again(album: Path, part: Path) -> str:
    """What packing to the target again is refused with."""
    with pytest.raises(DataError) as caught:
        pack_images(album, part.with_name("b.rec"), pack=PackOptions(shards=3))
    (problem,) = caught.value.problems
    assert problem.rule == "a job is continued from a folder that only its own user can have written"
    assert problem.consequence == "nothing was read from it, moved or deleted"
    return problem.given.removeprefix(f"{part}, which is not a job's that was interrupted: ")


def change(file: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(file.read_bytes())
    edit(content)
    file.write_text(json.dumps(content))


def test_the_plan_cannot_name_files_elsewhere(album: Path, interrupted: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    change(
        interrupted / "ending.json", lambda plan: plan["journals"]["all"][0]["files"].update({"../../precious": "0"})
    )
    assert again(album, interrupted) == "its ending.json names other files than those of this job"
    assert precious.read_text() == "mine"


def test_moves_of_earlier_releases_are_not_read(album: Path, interrupted: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    change(interrupted / "ending.json", lambda plan: plan.update(moves={"all-00000/part.rec": "precious"}))
    packed = pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3))
    assert packed.num_records == 30
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("kind", ["missing", "other"])
def test_a_shard_that_is_missing_or_changed_is_said(album: Path, interrupted: Path, kind: str) -> None:
    shard = next(interrupted.glob("all-*/*.rec"))
    if kind == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-4] + b"evil")
    said = again(album, interrupted)
    assert said.startswith(
        f"its file {shard.parent.name}/{shard.name} is missing" if kind == "missing" else f"{shard} is not as"
    )
    assert (interrupted / "ending.json").exists()


def test_series_of_another_job(album: Path, interrupted: Path) -> None:
    change(interrupted / "ending.json", lambda plan: plan["journals"].update({"../x": []}))
    assert again(album, interrupted) == "its ending.json names other files than those of this job"


def test_nothing_is_overwritten(album: Path, interrupted: Path, tmp_path: Path) -> None:
    mine = tmp_path / "b-00001-of-00003.rec"
    mine.write_text("mine")
    assert again(album, interrupted) == f"{mine} exists and is not of this job"
    assert mine.read_text() == "mine"


def test_a_folder_that_others_can_write(album: Path, interrupted: Path) -> None:
    interrupted.chmod(0o777)
    assert again(album, interrupted) == f"{interrupted} can be written by others (mode 777)"
    assert (interrupted / "ending.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user(album: Path, interrupted: Path) -> None:
    os.chown(interrupted, 65534, 65534)
    assert again(album, interrupted) == f"{interrupted} belongs to the user nobody"
    assert (interrupted / "ending.json").exists()


def test_a_link(album: Path, interrupted: Path, tmp_path: Path) -> None:
    interrupted.rename(tmp_path / "elsewhere")
    interrupted.symlink_to("elsewhere")
    assert again(album, interrupted) == "it is a link"
    assert (tmp_path / "elsewhere/ending.json").exists()


def test_a_folder_that_no_job_made_keeps_its_files(album: Path, tmp_path: Path) -> None:
    part = tmp_path / "b.rec.part"
    part.mkdir()
    (part / "thesis.txt").write_text("mine")
    assert again(album, part) == "it has no job.json of a packing job"
    assert (part / "thesis.txt").read_text() == "mine"


def test_nested_lists_are_no_plan(album: Path, interrupted: Path, tmp_path: Path) -> None:
    (interrupted / "ending.json").write_text("[" * 1_000_000)
    assert pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3)).num_records == 30
