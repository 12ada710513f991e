"""``unisono checkpoint import`` and ``export --format``: weights of MXNet and MindSpore."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Desk
from safetensors.torch import load_file
from states import bits
from torch import Tensor

from unisono.checkpoint import list_checkpoints, open_checkpoint
from unisono.interop.weight_file import open_weights

FIXTURES = Path(__file__).parents[1] / "interop" / "fixtures"
SUFFIXES = {"mxnet": ".params", "mindspore": ".ckpt"}


def load(path: Path) -> dict[str, Tensor]:
    with open_weights(path) as weights:
        return {name: tensor.load() for name, tensor in weights.tensors.items()}


def test_the_command_writes_safetensors_that_the_package_opens(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "mx.safetensors"
    done = desk.here("checkpoint", "import", str(FIXTURES / "named.params"), "--out", str(out), "--json")
    found = load_file(out)
    assert done.json["format"] == "mxnet"
    assert done.json["tensors"]["csr"] == {"dtype": "float32", "shape": [3, 4]}
    assert done.json["bytes"] == out.stat().st_size
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in load(FIXTURES / "named.params").items()
    }
    again = desk.here("checkpoint", "import", str(FIXTURES / "named.params"), "--out", str(out))
    assert (again.code, "a file that exists is not overwritten" in again.err) == (2, True)


def test_the_suffix_of_the_result_is_its_format(desk: Desk, tmp_path: Path) -> None:
    done = desk.here("checkpoint", "import", str(FIXTURES / "all.ckpt"), "--out", str(tmp_path / "a.params"))
    assert "15 tensors of" in done.out
    assert "text that no tensor holds: note" in done.out
    with open_weights(tmp_path / "a.params") as weights:
        assert weights.format == "mxnet"
    refused = desk.here("checkpoint", "import", str(FIXTURES / "all.ckpt"), "--out", str(tmp_path / "a.bin"))
    assert refused.code == 2
    assert "try:  " + str(tmp_path / "a.safetensors") in refused.err


def test_a_damaged_file_leaves_nothing_behind(desk: Desk, tmp_path: Path) -> None:
    source = tmp_path / "cut.params"
    source.write_bytes((FIXTURES / "named.params").read_bytes()[:-1])
    outcome = desk.here("checkpoint", "import", str(source), "--out", str(tmp_path / "a.safetensors"))
    assert outcome.code == 2
    assert "nothing was written" in outcome.err
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("kind", ["mxnet", "mindspore"])
def test_a_run_is_exported_to_one_file(desk: Desk, mine: Path, kind: str) -> None:
    done = desk.here("checkpoint", "export", str(mine), "--format", kind, "--json")
    path = mine / f"export{SUFFIXES[kind]}"
    assert done.json["path"] == str(path)
    found = load(path)
    newest = max(entry.path for entry in list_checkpoints(mine / "checkpoints") if entry.state == "committed")
    saved = open_checkpoint(newest)
    names = {name.removeprefix("model/") for name in saved.names() if name.startswith("model/")}
    assert names <= set(found)
    assert all(bits(found[name]) == bits(saved.tensor(f"model/{name}")) for name in names)
    again = desk.here("checkpoint", "export", str(mine), "--format", kind)
    assert "a file that exists is not overwritten" in again.err
