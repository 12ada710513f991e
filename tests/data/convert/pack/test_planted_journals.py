"""A folder TARGET.part that another user planted, or that no packing job made, moves, overwrites and deletes nothing."""

from __future__ import annotations

import grp
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from intruder import as_another_user, needs_another_user
from modes import public_folder

from unisono.data.convert.pack import PackOptions, pack_images
from unisono.data.convert.pack.partial_target import PartialTarget
from unisono.errors import DataError


@pytest.fixture
def interrupted(album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job that was killed before its first file had its name."""

    def failing(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", failing)
        with pytest.raises(KeyboardInterrupt):
            pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3))
    return tmp_path / "b.rec.part"


def again(album: Path, part: Path) -> str:
    """What packing to the target again is refused with."""
    with pytest.raises(DataError) as caught:
        pack_images(album, part.with_name("b.rec"), pack=PackOptions(shards=3))
    (problem,) = caught.value.problems
    assert problem.rule == "a job is continued from its own files, in a folder that only its user can have written"
    assert problem.consequence == "nothing was moved or deleted"
    return problem.given.removeprefix(f"{part} cannot be continued: ")


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


@pytest.mark.parametrize("file", ["all-00000.json", "ending.json"])
def test_a_journal_that_has_changed_counts_as_missing(
    album: Path, interrupted: Path, tmp_path: Path, file: str
) -> None:
    """A wrong number in it would lose inputs, or pack them twice."""

    def edit(content: Any) -> None:
        journal = content["journals"]["all"][0] if "journals" in content else content
        journal.update(stop=-1, records=1 << 40)

    change(interrupted / file, edit)
    if file != "ending.json":
        (interrupted / "ending.json").unlink()
    packed = pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3))
    whole = pack_images(album, tmp_path / "c.rec", pack=PackOptions(shards=3))
    assert packed.num_records == whole.num_records == 30
    assert [each.read_bytes() for each in packed.files] == [each.read_bytes() for each in whole.files]


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
def test_a_folder_that_a_group_can_write(album: Path, interrupted: Path) -> None:
    group = max(grp.getgrall(), key=lambda group: len(group.gr_mem) + (group.gr_gid == 65534))
    os.chown(interrupted, -1, group.gr_gid)
    interrupted.chmod(0o775)
    assert again(album, interrupted) == f"{interrupted} can be written by the group {group.gr_name} (mode 775)"
    assert (interrupted / "ending.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user(album: Path, interrupted: Path) -> None:
    os.chown(interrupted, 65534, 65534)
    assert again(album, interrupted) == f"{interrupted} belongs to the user nobody"
    assert (interrupted / "ending.json").exists()


def plants(part: str, files: dict[str, bytes]) -> str:
    """Makes the folder and ``files`` in it, readable for all."""
    os.umask(0)
    os.mkdir(part, 0o755)
    for name, content in files.items():
        path = Path(part, name)
        path.parent.mkdir(mode=0o755, exist_ok=True)
        path.write_bytes(content)
    return "planted"


def everything_in(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Owner and permissions of all that is in ``folder``, and of files the time of change and the content."""
    found = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {
        path.relative_to(folder).as_posix(): (
            status.st_uid,
            status.st_mode,
            # a file is made in a folder, and deleted, to see whether the file system gives files to another user
            status.st_mtime_ns if path.is_file() else 0,
            path.read_bytes() if path.is_file() else b"",
        )
        for path, status in found.items()
    }


@needs_another_user
def test_a_folder_that_another_user_planted(album: Path, interrupted: Path) -> None:
    """In a folder like /tmp, with all that a job of this very target would have written."""
    files = {
        path.relative_to(interrupted).as_posix(): path.read_bytes() for path in interrupted.rglob("*") if path.is_file()
    }
    assert {"job.json", "ending.json"} < set(files)
    with public_folder() as shared:
        shared.chmod(0o1777)
        part = shared / "b.rec.part"
        assert as_another_user(plants, str(part), files) == "planted"
        before = everything_in(shared)
        assert again(album, part) == f"{part} belongs to the user nobody"
        assert everything_in(shared) == before


def test_a_link(album: Path, interrupted: Path, tmp_path: Path) -> None:
    interrupted.rename(tmp_path / "elsewhere")
    interrupted.symlink_to("elsewhere")
    assert again(album, interrupted) == "it is a link"
    assert (tmp_path / "elsewhere/ending.json").exists()


@pytest.mark.parametrize("moment", ["clear", "commit", "remove"])
def test_a_link_that_takes_the_folders_place_meanwhile(
    album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The last check is past; nothing in the folder that the link leads to is moved or deleted."""
    precious = tmp_path / "precious"
    (precious / "all-00000").mkdir(parents=True)
    (precious / "all-00000" / "b.rec").write_text("mine")
    (precious / "job.json").write_text("mine")
    part = tmp_path / "b.rec.part"
    part.mkdir()
    (part / "job.json").write_text("0" * 32 + " of another job\n")
    (part / "old").touch()
    before = getattr(PartialTarget, moment)

    def exchange(*args: Any, **kwargs: Any) -> Any:
        if not part.is_symlink():
            part.rename(tmp_path / "moved")
            part.symlink_to("precious")
        return before(*args, **kwargs)

    monkeypatch.setattr(PartialTarget, moment, exchange)
    with suppress(OSError, DataError):
        assert pack_images(album, tmp_path / "b.rec").num_records == 30
    assert (precious / "all-00000" / "b.rec").read_text() == "mine"
    assert sorted(path.name for path in precious.iterdir())[:2] == ["all-00000", "job.json"]


@pytest.mark.parametrize("name", ["b.rec", "b.idx", "b.uidx", "b.rec.classes.txt"])
def test_files_that_others_make_meanwhile_are_not_overwritten(
    album: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    build = PartialTarget.build

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        (tmp_path / name).write_text("mine")
        return build(*args, **kwargs)

    monkeypatch.setattr(PartialTarget, "build", meanwhile)
    with pytest.raises(DataError, match=f"{name}, which exists"):
        pack_images(album, tmp_path / "b.rec")
    assert (tmp_path / name).read_text() == "mine"
    monkeypatch.undo()
    (tmp_path / name).unlink()
    assert pack_images(album, tmp_path / "b.rec").num_records == 30


def test_a_folder_in_which_others_can_make_files(album: Path, interrupted: Path) -> None:
    interrupted.chmod(0o1777)
    assert again(album, interrupted) == f"{interrupted} can be written by others (mode 1777)"


def test_a_lock_that_is_a_pipe_or_a_link(album: Path, interrupted: Path, tmp_path: Path) -> None:
    (interrupted / "lock").unlink()
    os.mkfifo(interrupted / "lock")
    assert again(album, interrupted) == "its lock is no regular file"
    (interrupted / "lock").unlink()
    (interrupted / "lock").symlink_to(tmp_path / "absent")
    assert again(album, interrupted).startswith("its file lock cannot be opened (ELOOP")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_what_is_no_folder(kind: str, album: Path, tmp_path: Path) -> None:
    part = tmp_path / "b.rec.part"
    part.write_text("mine") if kind == "file" else os.mkfifo(part)
    assert again(album, part) == "ENOTDIR, Not a directory"
    assert part.exists()


@pytest.mark.parametrize("name", ["b.idx", "b.rec.classes.txt", "b-00001-of-00003.idx"])
def test_files_beside_a_target_are_not_overwritten(album: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(DataError, match=f"{name}, which exists"):
        pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3))
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_that_no_job_made_keeps_its_files(album: Path, tmp_path: Path) -> None:
    part = tmp_path / "b.rec.part"
    part.mkdir()
    (part / "thesis.txt").write_text("mine")
    assert again(album, part) == "it has no job.json of a packing job"
    assert (part / "thesis.txt").read_text() == "mine"


def test_nested_lists_are_no_plan(album: Path, interrupted: Path, tmp_path: Path) -> None:
    (interrupted / "ending.json").write_text("[" * 1_000_000)
    assert pack_images(album, tmp_path / "b.rec", pack=PackOptions(shards=3)).num_records == 30
