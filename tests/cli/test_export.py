"""What a run exports of a model that no rank may hold: a tensor at a time, from the checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Desk
from torch import nn

from unisono.cli import rank
from unisono.cli.common import load_run
from unisono.cli.init import PYTHON_TEMPLATE
from unisono.train import load
from unisono.train.build import find_tokenizer


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Every model that a configuration was made into."""
    found: list[nn.Module] = []

    def build(*given: Any) -> nn.Module:
        found.append(made(*given))
        return found[-1]

    made = load.build_model
    monkeypatch.setattr(load, "build_model", build)
    return found


def is_whole(model: nn.Module) -> bool:
    return not any(parameter.is_meta for parameter in model.parameters())


def finished(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What rank 0 of a spread run does at its end: outcome and events."""
    events: list[dict[str, Any]] = []
    run: Any = SimpleNamespace(
        plan=SimpleNamespace(is_model_sharded=True),
        model=None,
        averaged_weights=nullcontext,
        state=SimpleNamespace(step=4),
        events=SimpleNamespace(emit=lambda kind, **fields: events.append({"kind": kind, **fields})),
    )
    config, outcome = load_run(str(run_dir)).value, {}
    data: Any = SimpleNamespace(tokenizer=find_tokenizer(config))
    assert rank.finish(run, config, data, outcome) is None
    return outcome, events


def test_the_end_of_a_spread_run(mine: Path, built: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    exported = (mine / "export/model.safetensors").read_bytes()
    monkeypatch.setattr(rank, "SAMPLE_BYTES", 1 << 10)
    outcome, (notice,) = finished(mine)
    assert "sample" not in outcome
    assert (notice["kind"], notice["code"]) == ("notice", "no_sample")
    assert notice["fix"].startswith(f"unisono generate {mine}")
    assert [is_whole(model) for model in built] == [False]
    assert Path(outcome["export"], "model.safetensors").read_bytes() == exported
    monkeypatch.undo()
    outcome, (sample,) = finished(mine)  # a small one is put together to write
    assert sample["text"] == outcome["sample"]
    assert outcome["sample"].startswith("def ")


@pytest.mark.full
@pytest.mark.parametrize("reads", [False, True])
def test_a_model_of_ones_own(desk: Desk, tmp_path: Path, built: list[nn.Module], reads: bool) -> None:
    """Empty, unless its construction reads what it has drawn."""
    path, run_dir = tmp_path / "own.py", tmp_path / "run"
    text = PYTHON_TEMPLATE.format(name=path.name)
    if reads:
        text = text.replace("Bigram(257, 257)", "Bigram(257, 257, _weight=torch.eye(257) * torch.rand(1).item())")
        assert "rand(1)" in text
    path.write_text(text)
    small = [each for each in desk.settings if not each.startswith("--set=model.")]
    done = desk.here("train", str(path), "--debug", *small, f"--set=run.dir={run_dir}", "--set=train.steps=1")
    assert done.code == 0, done.err
    before = (run_dir / "export/model.safetensors").read_bytes()
    built.clear()
    again = desk.here("checkpoint", "export", str(run_dir), str(tmp_path / "out"))
    assert again.code == 0, again.err
    assert [is_whole(model) for model in built] == [reads]
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
