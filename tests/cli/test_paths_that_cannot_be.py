"""Paths that the system cannot look up: the setting that has one is named in an error of four parts, in each verb."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import Desk

LONG = "a" * 5000
FAULTS = {
    LONG: "File name too long",
    "loop/x": "Too many levels of symbolic links",
    "nul\0": "NUL character",
}


@pytest.fixture(params=FAULTS, ids=["long", "loop", "NUL"])
def path(request: pytest.FixtureRequest, desk: Desk) -> str:
    if not os.path.lexists(desk.folder / "loop"):
        (desk.folder / "loop").symlink_to("loop")
    return request.param


def named(text: str, path: str, what: str) -> None:
    """Standard error is the error of a path with the four parts, and no traceback."""
    assert text.startswith("unisono: "), text
    assert [line[:7] for line in text.splitlines()[-3:]] == ["  rule:", "  so:  ", "  try: "], text
    assert FAULTS[path] in text
    assert what in text.splitlines()[0]


SETTINGS = {
    "data.corpus": "corpus",
    "data.tokenizer": "tokenizer",
    "model.pretrained": "model.pretrained",
    "plan.file": "strategy file",
    "run.dir": "run.dir",
    "data.cache_dir": "cache folder",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_train(desk: Desk, tmp_path: Path, path: str, setting: str) -> None:
    # sizes of a model are settings of their own, which do not go with a pretrained one
    settings = [text for text in desk.settings if not text.startswith("--set=model.")]
    run_dir = f"--set=run.dir={tmp_path}/run"
    done = desk.here("train", "--debug", run_dir, *settings, f"--set={setting}={json.dumps(path)}")
    assert done.code == 2, done
    named(done.err, path, SETTINGS[setting])


@pytest.mark.parametrize("setting", ["data.train", "data.eval"])
def test_addresses_of_train(desk: Desk, tmp_path: Path, path: str, setting: str) -> None:
    folder = tmp_path / "rows.csv"
    folder.write_text("text,label\na,0\nb,1\n" * 10)
    settings = {"task.kind": "text", "data.train": str(folder), "data.eval": str(folder), setting: path}
    done = desk.here(
        "train",
        "--debug",
        f"--set=run.dir={tmp_path}/run",
        *(f"--set={key}={json.dumps(value)}" for key, value in settings.items()),
    )
    assert done.code == 2, done
    named(done.err, path, "")


@pytest.mark.parametrize("setting", ["corpus", "tokenizer"])
def test_settings_of_a_run(desk: Desk, mine: Path, path: str, setting: str) -> None:
    lines = [line for line in (mine / "config.toml").read_text().splitlines() if not line.startswith(f"{setting} =")]
    at = lines.index("[data]")
    lines.insert(at + 1, f"{setting} = {json.dumps(path)}")
    (mine / "config.toml").write_text("\n".join(lines) + "\n")
    for verb in (("eval",), ("generate", "--prompt=a")) if setting == "tokenizer" else (("eval",),):
        done = desk.here(verb[0], str(mine), *verb[1:])
        assert done.code == 2, done
        named(done.err, path, setting)


def test_configurations(desk: Desk, tmp_path: Path, path: str) -> None:
    (tmp_path / "a.toml").write_text(f"base = {json.dumps(path + '.toml')}\n")
    (tmp_path / "loop").symlink_to("loop")
    done = desk.here("config", "show", str(tmp_path / "a.toml"))
    assert done.code == 2, done
    named(done.err, path, "a.toml:1: base = ")
    if "\0" not in path:  # which no command line has
        for given in (f"{path}.toml", f"{path}/config.toml"):
            done = desk.here("train", given)
            assert done.code == 2, done
            named(done.err, path, path[:20])
        for verb in ("eval", "generate"):
            assert desk.here(verb, path).code == 2
        for verb in ("ls", "verify"):
            done = desk.here("checkpoint", verb, path)
            assert (done.code, done.err.count("  try:  ")) == (2, 1), done
        done = desk.here("plan", "show", path)
        assert (done.code, done.err.count("  try:  ")) == (2, 1), done


def test_resuming(desk: Desk, tmp_path: Path, path: str) -> None:
    done = desk.train(tmp_path / "run", f"--set=run.resume={json.dumps('./' + path)}")
    assert (done.code, done.err.count("  try:  ")) == (2, 1), done


def test_data_files(desk: Desk, path: str) -> None:
    if "\0" in path:  # which no command line has
        return
    table, records = f"{path}.csv", f"{path}.rec"
    for arguments in (
        ("convert", table, "x.jsonl"),
        ("convert", str(desk.folder / "corpus" / "m0.py"), table),
        ("stats", records),
        ("verify", records),
        ("cat", records, "--index=0"),
        ("pack", path, "x.rec", "--kind=images"),
        ("pack", records, "x.rec", "--kind=rows"),
        ("pack", path, "x.bin", "--kind=text"),
        ("pack", str(desk.folder / "corpus"), f"{path}.bin", "--kind=text"),
    ):
        done = desk.here("data", *arguments)
        assert (done.code, done.err.count("  try:  ")) == (2, 1), done
