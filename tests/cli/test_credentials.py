"""Passwords that users give in addresses and arguments are in no file of a run, and in no text that a command prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Desk, Outcome, problem
from modes import FILE, FOLDER, PRIVATE, PRIVATE_FOLDER, mode_of, modes, umask, writable_by_others
from PIL import Image

from unisono.data.sources.open_source import open_source
from unisono.data.tokens import tokenized_cache
from unisono.errors import ConfigError
from unisono.storage.address import open_address
from unisono.storage.directory import make_folder

CANARY = "hunter2canary"

VAULT = """
from fsspec.implementations.local import LocalFileSystem

class Vault(LocalFileSystem):
    protocol, cachable = "vault", False
    def __init__(self, login="", **more):
        super().__init__(**more)
        if login != "me:hunter2canary":
            raise PermissionError(f"vault://{login}@: who is {login}?")
    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(path.rpartition("@")[2] if "://" in path else path)
    @staticmethod
    def _get_kwargs_from_urls(path):
        return {"login": path.partition("://")[2].rpartition("@")[0]}
"""


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> str:
    """``PYTHONPATH`` with a filesystem of fsspec that has local files and asks for a password."""
    folder = tmp_path_factory.mktemp("vault")
    (folder / "vault_filesystem.py").write_text(VAULT)
    package = folder / "vault_filesystem-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vault-filesystem\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[fsspec.specs]\nvault = vault_filesystem:Vault\n")
    return str(folder)


def address(path: Path, password: str = CANARY) -> str:
    return f"vault://me:{password}@{path}"


def leaks(folder: Path) -> list[Path]:
    """The files and names below ``folder`` that have the password."""
    assert folder.is_dir()
    found = [path for path in folder.rglob("*") if CANARY in str(path.relative_to(folder))]
    return found + [path for path in folder.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


def said(done: Outcome) -> str:
    return done.out + done.err


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_addresses_with_a_password(desk: Desk, tmp_path: Path, vault: str, processes: int) -> None:
    run, copies = tmp_path / "run", tmp_path / "copies"
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ncorpus = "{address(desk.folder / "corpus")}"\ncache_dir = "{tmp_path}/cache"\n'
        f'[checkpoint]\nupload_to = "{address(copies)}"\n'
    )
    settings = [text for text in desk.settings if not text.startswith(("--set=data.corpus", "--set=data.cache_dir"))]
    settings += [f"--set=run.dir={run}", f"--set=launch.num_processes={processes}"]
    done = desk.process("train", str(config), *settings, "-v", PYTHONPATH=vault)
    assert done.code == 0, done.err
    assert (copies / "step-00000004/COMMIT").is_file()
    assert CANARY not in said(done)
    assert [leaks(folder) for folder in (run, copies, tmp_path / "cache")] == [[], [], []]
    kept = (run / "config.toml").read_text()
    assert f'corpus = "vault://[redacted]@{desk.folder}/corpus"' in kept
    assert f"vault://[redacted]@{desk.folder}/corpus" in (run / "events/rank00000.jsonl").read_text()

    for command in (["config", "show", str(config)], ["config", "show", str(config), "--origin"]):
        for more in ([], ["--json"]):
            shown = desk.process(*command, *more, PYTHONPATH=vault)
            assert shown.code == 0
            assert "[redacted]" in shown.out
            assert CANARY not in said(shown)

    refused = desk.process("eval", str(run), PYTHONPATH=vault)
    assert refused.code == 2
    assert "which had credentials when the run was started\n  rule: files of a run keep no credentials" in refused.err
    variable = {"UNISONO__DATA__CORPUS": address(desk.folder / "corpus")}
    evaluated = desk.process("eval", str(run), "--json", PYTHONPATH=vault, **variable)
    assert evaluated.code == 0, evaluated.err
    assert CANARY not in said(evaluated)


@pytest.mark.full
@pytest.mark.parametrize("key", ["data.corpus", "data.train", "data.tokenizer", "checkpoint.upload_to"])
def test_a_refused_password_is_not_quoted(desk: Desk, tmp_path: Path, vault: str, key: str) -> None:
    given = f"--set={key}={address(tmp_path / 'nothing', f'wrong/{CANARY}')}"
    settings = [text for text in desk.settings if not text.startswith(f"--set={key}=")]
    if key == "data.train":
        settings = ["--set=task.kind=table", "--set=plan.global_batch=4", "--set=train.steps=2"]
    for more in ([], ["--json"], ["-v"]):
        done = desk.process("train", f"--set=run.dir={tmp_path / 'run'}", *settings, given, *more, PYTHONPATH=vault)
        assert done.code in (1, 2), done.err
        assert "[redacted]@" in said(done)
        assert CANARY not in said(done)
    assert not (tmp_path / "run").exists() or leaks(tmp_path / "run") == []


def test_a_password_is_in_no_traceback_of_a_script(tmp_path: Path, vault: str) -> None:
    script = f"""
from pathlib import Path
from unisono.data.sources.remote import local_path
local_path({address(tmp_path, f"wrong{CANARY}")!r}, Path({str(tmp_path)!r}))
"""
    path = os.pathsep.join([vault, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-"], input=script, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "DataError: vault://[redacted]@" in done.stderr
    assert CANARY not in done.stderr


FAILS = """
import sys
from unisono.errors import DataError
sys.excepthook = lambda *error: None  # what a script prints is its own
raise ValueError(f"ftp://me:{sys.argv[2]}@host and token={sys.argv[2]}")
"""


def test_arguments_of_a_launch(desk: Desk, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    folder = tmp_path / "launch"
    command = [sys.executable, str(script), "--token", CANARY, f"--api-key={CANARY}", f"ftp://me:{CANARY}@host/a", "-x"]
    command += [f"--access_token=a;{CANARY}", f"HF_TOKEN=a, {CANARY}", f"password: a {CANARY}", "--pw", CANARY]
    done = desk.process("launch", "-n", "2", "--dir", str(folder), "--max-restarts", "0", "--", *command)
    assert done.code == 1, done.err
    assert CANARY not in said(done)
    assert leaks(folder) == []
    record = json.loads((folder / "launch.json").read_text())
    kept = ["--token", "[redacted]", "--api-key=[redacted]", "ftp://[redacted]@host/a", "-x"]
    kept += ["--access_token=[redacted]", "HF_TOKEN=[redacted]", "password: [redacted]", "--pw", "[redacted]"]
    assert record["command"] == [sys.executable, str(script), *kept]
    failure = json.loads((folder / "logs/failure-rank-0.json").read_text())
    assert failure["message"] == "ftp://[redacted]@host and token=[redacted]"
    for name in ("launch.json", "logs/failure-rank-0.json"):
        assert mode_of(folder / name) == PRIVATE, name


@pytest.mark.full
def test_a_traceback_of_the_command_line(desk: Desk, tmp_path: Path) -> None:
    config = tmp_path / "run.py"
    config.write_text(f"""
from unisono.train import RunConfig
class Objective:
    def __call__(self, outputs, batch):
        raise ValueError("ftp://me:{CANARY}@host/a", dict(token="{CANARY}"))
def config():
    from unisono.train import Components
    return RunConfig(components=Components(objective=Objective()))
""")
    done = desk.process("train", str(config), f"--set=run.dir={tmp_path / 'run'}", *desk.settings)
    assert done.code == 1
    assert "ftp://[redacted]@host/a" in done.err
    assert CANARY not in said(done)
    assert leaks(tmp_path / "run") == []


@pytest.mark.full
def test_files_of_a_run_follow_the_umask_and_others_never_write(desk: Desk, tmp_path: Path) -> None:
    run, launch = tmp_path / "above/run", tmp_path / "above/launch"
    trackers = '--set=observe.trackers=["csv", "tensorboard"]'
    with umask(0):
        train = ["-P", "-m", "unisono", "train", *desk.settings, f"--set=run.dir={run}", trackers]
        done = desk.process("launch", "-n", "2", "--dir", str(launch), "--", sys.executable, *train)
        assert done.code == 0, done.err
        above = tmp_path / "above"
        table = tmp_path / "table.csv"
        table.write_text("a,b\n1,x\n2,y\n")
        for name in ("ant", "bee"):
            (tmp_path / "album" / name).mkdir(parents=True)
            Image.new("RGB", (20, 30)).save(tmp_path / "album" / name / "0.jpg")
        (above / "packed").mkdir(mode=FOLDER)
        cache = f"--set=data.cache_dir={above}/cache/data"
        made = [
            desk.process("checkpoint", "export", str(run), str(above / "more/export")),
            desk.process(
                "checkpoint", "convert", str(next((run / "checkpoints").glob("step-*"))), str(above / "converted")
            ),
            desk.process("data", "pack", str(desk.folder / "corpus"), str(above / "packed/text.bin"), "--kind=text"),
            *(
                desk.process("data", "pack", "--kind=rows", str(table), str(above / f"packed/rows.{kind}"))
                for kind in ("mindrecord", "jsonl", "parquet", "tar", "csv")
            ),
            desk.process("train", "--debug", *desk.settings, cache, f"--set=run.dir={above}/second"),
            desk.process("init", str(above / "run.toml")),
        ]
    assert [each.err for each in made if each.code] == []
    found = modes(tmp_path / "above")
    folders = {
        path.relative_to(tmp_path / "above").as_posix() for path in (tmp_path / "above").rglob("*") if path.is_dir()
    }
    # arguments may be secrets, the data may be private, and who can read a lock can take it
    private = re.compile(r"launch/launch\.json|.*\.lock|cache/data(/tokens-\w+)?")
    wrong = {
        name: oct(mode)
        for name, mode in found.items()
        if mode
        != (
            (PRIVATE_FOLDER if private.fullmatch(name) else FOLDER)
            if name in (".", *folders)
            else (PRIVATE if private.fullmatch(name) else FILE)
        )
    }
    assert wrong == {}
    assert writable_by_others(tmp_path / "above") == {}
    made_by_each = (
        "run/config.toml",
        "run/plan.json",
        "run/export/",
        "run/checkpoints/step-",
        "run/events/",
        "run/metrics.csv",
    )
    made_by_each += ("run/tensorboard/", "run/report.html", "launch/launch.json", "launch/logs/rank-1", "more/export/")
    made_by_each += (
        "converted/step-",
        "packed/text-00000.bin",
        "packed/rows.mindrecord.db",
        "cache/data/tokens-",
        "run.toml",
    )
    assert [part for part in made_by_each if not any(name.startswith(part) for name in found)] == []


@pytest.mark.parametrize("mask", [0, 0o002])
def test_no_group_writes_to_prepared_data(
    desk: Desk, tmp_path: Path, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the umask of private groups too: tokens, their listing, and rows that are copied for random access."""
    monkeypatch.setattr(tokenized_cache, "_FRESH_NS", 0)  # files as new as this corpus have no place in a listing
    cache = tmp_path / "cache"
    table = tmp_path / "table.csv"
    table.write_text("a,b\n1,x\n2,y\n")
    with umask(mask):
        done = desk.train(tmp_path / "run", f"--set=data.cache_dir={cache}")
        assert done.code == 0, done.err
        assert len(open_source(table, cache_dir=cache)) == 2
    found = modes(cache)
    wanted = {
        r"tokens-\w+": PRIVATE_FOLDER,
        r"tokens-\w+\.lock": PRIVATE,
        r"tokens-\w+/train-00000\.bin": FILE,
        r"listing-\w+\.json": FILE,
        r"(.*/)?rows-\w+\.rec": FILE,
    }
    for pattern, mode in wanted.items():
        assert [found[name] for name in found if re.fullmatch(pattern, name)] == [mode], pattern
    assert writable_by_others(cache) == {}


def test_a_run_folder_follows_the_umask(tmp_path: Path) -> None:
    with umask(0o027):
        make_folder(tmp_path / "a/b")
        make_folder(tmp_path / "a/c", mode=0o700)
        make_folder(tmp_path / "a/b")
    assert modes(tmp_path / "a") == {".": 0o750, "b": 0o750, "c": 0o700}
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")


def test_the_error_of_an_address_from_the_folder_of_a_run() -> None:
    with pytest.raises(ConfigError) as caught:
        open_address("ftp://[redacted]@host/a", "the address 'ftp://[redacted]@host/a'")
    assert f"unisono: {caught.value}\n" == problem(
        "the address 'ftp://[redacted]@host/a', which had credentials when the run was started",
        "files of a run keep no credentials of addresses",
        "nothing was opened",
        "the full address again, by --set or a variable UNISONO__SECTION__NAME; or credentials in the environment, "
        "as the filesystem's package reads them",
    )
