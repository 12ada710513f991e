"""The folder of a run is data: its Python file runs only if this user has run it before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from commands import Desk, make_desk

CODE = """
from pathlib import Path
from unisono import RunConfig
from unisono.train import Components

Path({canary!r}).touch()

def loss(outputs, batch):
    from unisono.train import next_token
    return next_token(outputs, batch)

def config():
    return RunConfig(components=Components(objective=loss))
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return make_desk(tmp_path / "desk", tmp_path / "cache")


@pytest.fixture
def script(desk: Desk, tmp_path: Path) -> Path:
    path = desk.folder / "run.py"
    path.write_text(CODE.format(canary=str(tmp_path / "canary")))
    return path


def commands(run_dir: Path) -> list[list[str]]:
    return [
        ["eval", str(run_dir)],
        ["generate", str(run_dir)],
        ["checkpoint", "export", str(run_dir), f"{run_dir}-export"],
        ["train", "--debug", f"--set=run.dir={run_dir}"],
        ["train", "--debug", str(run_dir / "config.toml")],
        ["config", "show", str(run_dir / "config.toml")],
        ["config", "show", f"--set=run.dir={run_dir}"],
    ]


def test_python_of_a_strangers_run_folder_does_not_run(desk: Desk, script: Path, tmp_path: Path) -> None:
    canary, run_dir = tmp_path / "canary", tmp_path / "run"
    done = desk.train(run_dir, str(script))
    assert done.code == 0, done.err
    stranger = tmp_path / "stranger"
    run_dir.rename(stranger)
    evil = stranger / "evil.py"
    evil.write_text(script.read_text())
    text = (stranger / "config.toml").read_text()
    assert f'base = "{script}"' in text
    (stranger / "config.toml").write_text(text.replace(f'base = "{script}"', 'base = "evil.py"'))
    canary.unlink()
    for command in commands(stranger):
        done = desk.here(*command)
        assert done.code == 2, (command, done.out, done.err)
        assert done.err == (
            f'unisono: {stranger}/config.toml:2: base = "evil.py": {evil} is a file that you have not run in this form\n'
            "  rule: the folder of a run can be anybody's: its Python file runs if you have run that file with this content "
            "before, and nobody else can write to it\n"
            "  so:   nothing was started\n"
            "  try:  look at the file, then add --trust-python (each time, for a file that others own or can write); "
            "a run of TOML alone needs no code\n"
        )
        assert not canary.exists(), command
    done = desk.here("eval", str(stranger), "--trust-python")
    assert done.code == 0, done.err
    assert canary.exists()
    assert desk.here("eval", str(stranger)).code == 0, "the user has run it now"


def test_python_that_gives_plain_values_is_recorded_too(desk: Desk, tmp_path: Path) -> None:
    plain = "from unisono import RunConfig\n\ndef config():\n    return RunConfig()\n"
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "evil.py").write_text(plain)
    (folder / "config.toml").write_text('base = "evil.py"\n')
    show = ["config", "show", str(folder / "config.toml")]
    assert desk.here(*show).code == 2
    assert desk.here(*show, "--trust-python").code == 0
    assert desk.here(*show).code == 0, "the user has run it now"


def test_a_configuration_of_nested_lists_is_refused_by_every_command(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "config.toml").write_text(f"a = {'[' * 3000}{']' * 3000}\n")
    for command in (["eval", str(folder)], ["generate", str(folder)], ["train", "--debug", f"--set=run.dir={folder}"]):
        done = desk.here(*command)
        assert done.code == 2, (command, done.out, done.err)
        assert "Traceback" not in done.err
        assert "\n  rule: " in done.err


def test_own_python_runs_until_it_changes_or_others_can_write_it(desk: Desk, script: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert desk.train(run_dir, str(script)).code == 0
    assert desk.here("eval", str(run_dir)).code == 0
    for path, mode in ((script, 0o666), (desk.folder, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        done = desk.here("eval", str(run_dir))
        assert done.code == 2
        assert f": {path} can be written by others (mode {mode:o})" in done.err
        path.chmod(before)
    script.write_text(script.read_text() + "\n# another text\n")
    done = desk.here("eval", str(run_dir))
    assert done.code == 2
    assert "a file that you have not run in this form" in done.err
    assert desk.train(tmp_path / "other", str(script)).code == 0, "naming the file itself is enough"
    assert desk.here("eval", str(run_dir)).code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_python_of_another_user_does_not_run_though_it_was_run_before(desk: Desk, script: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert desk.train(run_dir, str(script)).code == 0
    os.chown(script, 65534, 65534)
    done = desk.here("eval", str(run_dir))
    assert done.code == 2
    assert f": {script} belongs to the user nobody" in done.err


def test_a_base_of_the_base_and_a_link_are_the_run_folders_too(desk: Desk, script: Path, tmp_path: Path) -> None:
    run_dir, canary = tmp_path / "run", tmp_path / "canary"
    assert desk.train(run_dir, str(script)).code == 0
    config = run_dir / "config.toml"
    text = config.read_text()
    evil = run_dir / "evil.py"
    evil.write_text(script.read_text())
    (run_dir / "middle.toml").write_text('base = "evil.py"\n')
    canary.unlink()
    config.write_text(text.replace(f'base = "{script}"', 'base = "middle.toml"'))
    assert "a file that you have not run in this form" in desk.here("eval", str(run_dir)).err
    config.rename(run_dir / "other.toml")
    config.symlink_to("other.toml")
    assert "a file that you have not run in this form" in desk.here("eval", str(run_dir)).err
    evil.unlink()
    evil.symlink_to(script)  # the user's own file, by another name
    assert desk.here("eval", str(run_dir)).code == 0
    assert canary.exists()


@pytest.mark.full
def test_ranks_of_one_start_run_what_their_parent_was_trusted_with(desk: Desk, script: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert desk.train(run_dir, str(script)).code == 0
    evil = run_dir / "evil.py"
    evil.write_text(script.read_text())
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace(f'base = "{script}"', 'base = "evil.py"'))
    more = ["train", f"--set=run.dir={run_dir}", "--set=train.steps=6", "--set=launch.num_processes=2"]
    # no state can be kept there
    nowhere = {"XDG_STATE_HOME": "/proc/nowhere"}
    done = desk.process(*more, **nowhere)
    assert done.code == 2
    assert "a file that you have not run in this form" in done.err
    done = desk.process(*more, "--trust-python", **nowhere)
    assert done.code == 0, done.err


def test_a_run_file_with_a_chain_of_bases_is_only_checked(desk: Desk, script: Path, tmp_path: Path) -> None:
    """Its Python neither runs nor is asked for where another CONFIG is given."""
    canary, run_dir = tmp_path / "canary", tmp_path / "run"
    assert desk.train(run_dir).code == 0
    (run_dir / "evil.py").write_text(script.read_text())
    (run_dir / "mid.toml").write_text('base = "evil.py"\n')
    (run_dir / "config.toml").write_text('base = "mid.toml"\n[train]\nsteps = 5\n')
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 5\n")
    done = desk.train(run_dir, str(tmp_path / "mine.toml"))
    assert done.code == 0, done.err
    assert not canary.exists()


@pytest.mark.full
@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can give a file away: the run of another user was not evaluated"
)
def test_a_run_of_another_user_does_not_choose_where_copies_of_ones_data_are_kept(desk: Desk, tmp_path: Path) -> None:
    run_dir, theirs, mine = tmp_path / "run", tmp_path / "theirs", tmp_path / "mine"
    done = desk.train(run_dir)
    assert done.code == 0, done.err
    config = run_dir / "config.toml"
    text, chosen = config.read_text(), f'cache_dir = "{desk.cache}/data"'
    assert text.count(chosen) == 1
    config.write_text(text.replace(chosen, f'cache_dir = "{theirs}"'))
    assert desk.process("eval", str(run_dir), XDG_CACHE_HOME=str(mine)).code == 0
    assert theirs.is_dir(), "one's own run does"
    shutil.rmtree(theirs)
    os.chown(config, 65534, 65534)
    done = desk.process("eval", str(run_dir), XDG_CACHE_HOME=str(mine))
    assert done.code == 0, done.err
    text, more = config.read_text(), [f"--set=run.dir={run_dir}", "--set=train.steps=6"]
    assert text.count('upload_to = ""') == 1
    config.write_text(text.replace('upload_to = ""', f'upload_to = "file://{theirs}"'))
    done = desk.process("train", "--debug", *more, XDG_CACHE_HOME=str(mine))
    assert done.code == 0, done.err
    assert f"{config} belongs to the user" in done.err
    assert "its data.cache_dir and checkpoint.upload_to are not used; --set gives one of your own" in done.err
    assert not theirs.exists()
    assert list(mine.glob("unisono/tokens-*/train-00000.bin"))
    assert {path.stat().st_mode & 0o077 for path in (mine / "unisono", *mine.glob("unisono/tokens-*"))} == {0}


def test_a_record_in_a_folder_that_others_can_write_does_not_count(desk: Desk, script: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert desk.train(run_dir, str(script)).code == 0
    assert desk.here("eval", str(run_dir)).code == 0
    (records,) = tmp_path.rglob("python-files")
    records.chmod(0o777)
    done = desk.here("eval", str(run_dir))
    assert done.code == 2
    assert "is a file that you have not run in this form" in done.err
