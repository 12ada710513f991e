"""Public signatures are those of the committed snapshot, and a change of them needs a line in the changelog."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

import pytest
import signatures
from signatures import changes, describe, digest, newest_section, read, render, unnamed


def test_public_signatures_are_those_of_the_snapshot() -> None:
    lines, _ = read()
    changed = changes(lines, signatures.signatures())
    assert not changed, (
        "public signatures have changed; name each in CHANGELOG.md, then run: "
        + signatures.COMMAND
        + "".join(f"\n  {name}: {words}" for name, words in changed.items())
    )


def test_the_snapshot_file_is_what_the_command_writes() -> None:
    lines, seen = read()
    written = signatures.SNAPSHOT.read_text()
    head, _, body = written.partition("\n\n")
    assert body == render(lines, "").partition("\n\n")[2]
    assert head.splitlines()[0].endswith(signatures.COMMAND)
    assert all(len(word) == 8 for word in seen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    tp: int = 1
    names: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> float:
        return 1.0


class Base:
    def __init__(self, path: Path, *, check: bool = False) -> None: ...

    def read(self, *indices: int, **more: Any) -> bytes:
        return b""

    def _hidden(self) -> None: ...


class Reader(Base):
    size: int

    def __len__(self) -> int:
        return 0

    @classmethod
    async def open(cls, sort: Any = sorted) -> Reader:
        return cls(Path())


class Kind(enum.Enum):
    LOCAL = "local"


def loss(outputs: list[float], /, scale: float = 2.0) -> float:
    return scale


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (
            Options,
            {
                "x": "dataclass [frozen]",
                "x.tp": "field: int = 1",
                "x.names": "field: dict[str, int] = dict()",
                "x.total": "property: float",
            },
        ),
        (
            Reader,
            {
                "x": "class(Base) (path: Path, *, check: bool = False) -> None",
                "x.__len__": "def (self) -> int",
                "x.open": "classmethod async def (cls, sort: Any = sorted) -> Reader",
                "x.read": "def (self, *indices: int, **more: Any) -> bytes",
                "x.size": "attribute: int",
            },
        ),
        (Kind, {"x": "enum(Enum)", "x.LOCAL": "= 'local'"}),
        (loss, {"x": "def (outputs: list[float], /, scale: float = 2.0) -> float"}),
        (1e-3, {"x": "= 0.001"}),
        (object(), {"x": "instance of builtins.object"}),
    ],
)
def test_how_a_name_is_described(value: Any, lines: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (Base, Reader, Options):
        monkeypatch.setattr(cls, "__module__", "unisono.example")
    assert dict(describe("x", value)) == lines


def test_changes() -> None:
    assert changes({"a": "1", "b": "2", "c": "3"}, {"b": "2", "c": "4", "d": "5"}) == {
        "a": "gone, was 1",
        "c": "3 -> 4",
        "d": "new: 5",
    }


CHANGELOG = """# Changelog

## 0.2.0 (unreleased)

- `Loader.read` takes a seed

## 0.1.0

- `Trainer`
"""


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ("", ["unisono.Trainer", "unisono.data.image.Decoder"]),
        ("- `unisono.data.image.*` is new", ["unisono.Trainer"]),
        ("- Trainer and Decoder, without backquotes", ["unisono.Trainer", "unisono.data.image.Decoder"]),
        ("- `Trainer(model)` is now `Run`, `image.Decoder` is new", []),
    ],
)
def test_every_changed_name_is_in_the_newest_section(more: str, missing: list[str]) -> None:
    section = newest_section(CHANGELOG.replace("seed\n", f"seed\n{more}\n"))
    changed = ["unisono.data.Loader", "unisono.data.Loader.read", "unisono.Trainer.fit", "unisono.data.image.Decoder"]
    assert unnamed(changed, section, set()) == missing


def test_a_line_serves_for_one_change(tmp_path: Path) -> None:
    path = tmp_path / "signatures.txt"
    path.write_text(render({"unisono.data.Loader": "class"}, CHANGELOG))
    lines, seen = read(path)
    assert lines == {"unisono.data.Loader": "class"}
    assert seen == {digest("- `Loader.read` takes a seed")}
    assert unnamed(["unisono.data.Loader"], newest_section(CHANGELOG), seen) == ["unisono.data.Loader"]


def test_the_command_refuses_and_then_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    current = {"unisono.data.Loader": "class", "unisono.Trainer": "class"}
    monkeypatch.setattr(signatures, "SNAPSHOT", tmp_path / "signatures.txt")
    monkeypatch.setattr(signatures, "CHANGELOG", tmp_path / "CHANGELOG.md")
    monkeypatch.setattr(signatures, "signatures", lambda: current)
    monkeypatch.setattr("sys.argv", ["signatures.py", "--write"])
    signatures.CHANGELOG.write_text(CHANGELOG)
    assert signatures.main() == 0  # the first time
    current["unisono.Trainer"] = "class (model)"
    assert signatures.main() == 1
    assert capsys.readouterr().out.endswith(
        "not written: no new line of the newest section of CHANGELOG.md names, in backquotes,\n  unisono.Trainer\n"
    )
    assert read()[0]["unisono.Trainer"] == "class"
    signatures.CHANGELOG.write_text(CHANGELOG.replace("seed\n", "seed\n- `Trainer` takes a model\n"))
    assert signatures.main() == 0
    assert read()[0] == current
