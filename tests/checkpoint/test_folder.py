from __future__ import annotations

import threading

import pytest
import torch
from modes import modes, umask
from states import make, save_steps

from unisono.checkpoint import folder, list_checkpoints, open_checkpoint, quarantine_after, verify
from unisono.errors import CheckpointError
from unisono.storage import directory


def committed(root, *steps):
    for step in steps:
        path = root / folder.step_name(step)
        path.mkdir(parents=True)
        (path / "COMMIT").write_text("{}")


def test_names_are_parsed_as_integers_only():
    assert [folder.step_of(folder.step_name(step)) for step in (0, 120, 10**8, 10**12)] == [0, 120, 10**8, 10**12]
    for name in (
        "step-../../x",
        "step-1e3",
        "step-120",
        "step-00000120/",
        "step-00000120 ",
        "step-00000120\n",
        "step--0000012",
        "step-+0000012",
        "step-0_000_012",
        "step-000000120",
        "step-\u0660\u0660\u0660\u0660\u0660\u0661\u0662\u0660",
        "step-00000120.tmp-1",
        "Step-00000120",
        "step-" + "9" * 40,
    ):
        assert folder.step_of(name) is None, name


def test_the_list_has_real_directories_with_such_names_only(tmp_path):
    root = tmp_path / "checkpoints"
    committed(root, 5, 120)
    (root / "step-00000030").mkdir()
    elsewhere = tmp_path / "elsewhere"
    committed(elsewhere, 999)
    (root / "step-00000999").symlink_to(elsewhere / "step-00000999", target_is_directory=True)
    (root / "step-00000998").write_text("a file")
    (root / "step-00000031").mkdir()
    (root / "step-00000031" / "COMMIT").symlink_to(elsewhere / "step-00000999" / "COMMIT")
    for name in ("step-1e3", "step-120", "step-00000040.tmp-1", "step-00000041.trash", "notes"):
        (root / name).mkdir()
    directory.quarantine_directory(root / "step-00000005", "a test")
    found = [(entry.step, entry.path.name, entry.state) for entry in list_checkpoints(root)]
    assert found == [
        (30, "step-00000030", "uncommitted"),
        (31, "step-00000031", "uncommitted"),
        (120, "step-00000120", "committed"),
        (5, "step-00000005", "quarantined"),
    ]
    assert list_checkpoints(tmp_path / "missing") == []
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    assert list_checkpoints(tmp_path / "link") == []


def test_a_link_to_a_checkpoint_is_refused(tmp_path):
    save_steps(tmp_path / "real", 5)
    root = tmp_path / "checkpoints"
    root.mkdir()
    (root / "step-00000005").symlink_to(tmp_path / "real" / "step-00000005", target_is_directory=True)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(root / "step-00000005")
    assert str(caught.value) == (
        f"{root}/step-00000005: a link is no checkpoint; those are directories called like step-00000120\n"
        "  rule: a checkpoint is loaded only if it is committed and whole\n"
        "  so:   nothing was loaded from it\n"
        "  try:  'unisono checkpoint ls' shows what there is; resume = \"auto\" takes the newest valid one"
    )
    for name in ("step-../../x", "step-1e3"):
        with pytest.raises(CheckpointError, match="is no checkpoint"):
            open_checkpoint(root / name)
    assert len(verify(root / "step-00000005")) == 1


def test_leftovers_of_crashes_go_when_a_run_starts_and_nothing_else(tmp_path):
    root = tmp_path / "checkpoints"
    committed(root, 10)
    gone = ("step-00000020.tmp-1", "step-00000020.tmp-13", "step-00000003.trash", "step-00000003.trash-2")
    stay = ("step-00000020.tmp-x", "step-20.tmp-1", "other.tmp-1", "step-00000030")
    for name in (*gone, *stay):
        (root / name / "inside").mkdir(parents=True)
    (root / "step-00000021.tmp-1").symlink_to(tmp_path, target_is_directory=True)
    make(root).close()
    left = {path.name for path in root.iterdir()}
    assert left == {*stay, "step-00000010", "step-00000021.tmp-1"}


def test_a_worker_that_starts_leaves_the_saves_of_others_alone(tmp_path):
    """Each worker of an asynchronous run is a world of its own; they have one folder, and maybe one attempt number."""
    root, begun, go_on = tmp_path / "checkpoints", threading.Event(), threading.Event()

    def wait_halfway(point):
        if point == "mid_shard":
            begun.set()
            assert go_on.wait(60)

    first = make(root, worker=0, fault=wait_halfway)
    first.save(1, {"a": torch.zeros(4)}, {}, {})
    assert begun.wait(60)
    second = make(root, worker=1)
    second.save(1, {"a": torch.ones(4)}, {}, {})
    second.wait()
    assert [path.name for path in root.iterdir() if ".tmp-" in path.name] == ["step-00000001.tmp-1-0"]
    go_on.set()
    for each in (first, second):
        each.close()
    assert first.committed_step is None
    assert open_checkpoint(root / "step-00000001").tensor("a").tolist() == [1.0] * 4
    assert verify(root / "step-00000001") == []
    (root / "step-00000002.tmp-3-1").mkdir()
    third = make(root, worker=1)
    assert (root / "step-00000002.tmp-3-1").exists()
    third.remove_leftovers()
    third.close()
    assert [path.name for path in root.iterdir()] == ["step-00000001"]


def test_a_removal_interrupted_anywhere_leaves_no_checkpoint(tmp_path, monkeypatch):
    for name in ("rename", "rmtree"):
        root = tmp_path / name
        committed(root, 10)

        def interrupted(*args, **kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(directory.Path if name == "rename" else directory.shutil, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                folder.remove(root / "step-00000010")
        assert [entry.state for entry in list_checkpoints(root)] in ([], ["uncommitted"])
        make(root).close()
        assert [path.name for path in root.iterdir() if path.name.endswith("trash")] == []


def test_quarantine_keeps_every_copy_and_says_why(tmp_path):
    for reason in ("first", "second", "third"):
        committed(tmp_path, 7)
        directory.quarantine_directory(tmp_path / "step-00000007", reason)
    found = {path.name: (path / "reason.txt").read_text() for path in (tmp_path / "quarantine").iterdir()}
    assert found == {"step-00000007": "first\n", "step-00000007.1": "second\n", "step-00000007.2": "third\n"}
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [7, 7, 7]


def test_going_back_sets_the_later_checkpoints_aside(tmp_path):
    committed(tmp_path, 10, 20, 30)
    (tmp_path / "step-00000040").mkdir()
    quarantine_after(tmp_path, 10)
    assert [(entry.step, entry.state) for entry in list_checkpoints(tmp_path)] == [
        (10, "committed"),
        (20, "quarantined"),
        (30, "quarantined"),
        (40, "quarantined"),
    ]
    assert "resumed from step 10" in (tmp_path / "quarantine" / "step-00000030" / "reason.txt").read_text()


@pytest.mark.parametrize(("mask", "folder", "file"), [(0, 0o755, 0o644), (0o027, 0o750, 0o640), (0o077, 0o700, 0o600)])
def test_files_and_folders_follow_the_umask_and_others_never_write(tmp_path, mask, folder, file):
    with umask(mask):
        save_steps(tmp_path / "checkpoints", 5)
        save_steps(tmp_path / "checkpoints", 7)
        quarantine_after(tmp_path / "checkpoints", 5)
    assert modes(tmp_path / "checkpoints") == {
        ".": folder,
        "step-00000005": folder,
        "step-00000005/COMMIT": file,
        "step-00000005/manifest.json": file,
        "step-00000005/shard-00000-of-00001.safetensors": file,
        "quarantine": folder,
        "quarantine/step-00000007": folder,
        "quarantine/step-00000007/COMMIT": file,
        "quarantine/step-00000007/manifest.json": file,
        "quarantine/step-00000007/reason.txt": file,
        "quarantine/step-00000007/shard-00000-of-00001.safetensors": file,
    }


def test_a_folder_that_cannot_be_made_is_an_error_before_the_run(tmp_path):
    (tmp_path / "run").write_text("a file")
    root = tmp_path / "run" / "checkpoints"
    with pytest.raises(CheckpointError) as caught:
        make(root)
    assert str(caught.value) == (
        f"the checkpoint folder {root}: ENOTDIR, Not a directory\n"
        "  rule: the folder can be made and written by this user\n"
        "  so:   the run could not save itself, so it was not started\n"
        f"  try:  choose another run.dir, or give yourself write permission on {root.parent}"
    )


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(CheckpointError, match="is a link\n  rule: checkpoints lie in a real directory"):
        make(tmp_path / "checkpoints")
    assert list((tmp_path / "elsewhere").iterdir()) == []
