"""What the commands that make a model smaller share: sources and settings that do not fit are refused, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Desk

QUANTIZE = ("quantize", "--scheme=int8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set=data.seq_len=8",), "--set gives those of a Hugging Face folder"),
        (("--metric=los",), "did you mean 'loss'?"),
        (("--metric=nothing",), "the evaluation has loss, bits_per_byte, accuracy"),
    ],
)
def test_settings_that_do_not_fit_a_run_are_refused(
    desk: Desk, trained: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    refused = desk.here(*QUANTIZE, str(trained), f"--out={tmp_path / 'out'}", *arguments)
    assert (refused.code, said in refused.err) == (2, True), refused.err
    assert list(tmp_path.iterdir()) == []


def test_a_metric_that_is_not_there_is_refused_before_any_work(
    desk: Desk, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unisono.compress import figures, quantize

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work before the check")

    monkeypatch.setattr(quantize, "quantize_model", work)
    monkeypatch.setattr(figures, "compare", work)
    refused = desk.here(*QUANTIZE, str(trained), f"--out={tmp_path / 'out'}", "--metric=accurcy")
    assert (refused.code, "did you mean 'accuracy'?" in refused.err) == (2, True), refused.err
    assert "nothing was compressed" in refused.err


def test_the_limit_is_a_rise_of_a_loss_and_a_fall_of_a_score() -> None:
    from unisono.compress.figures import Comparison, Figures

    def figures(**evaluation: float) -> Figures:
        return Figures(evaluation=evaluation, stored_bytes=1, peak_bytes=1, latency_s=1.0)

    comparison = Comparison(
        before=figures(loss=2.0, accuracy=0.5),
        after=figures(loss=2.5, accuracy=0.4),
        latency_ratio=1.0,
        latency_quartiles=(1.0, 1.0),
        device="cpu",
        micro_batch=1,
        samples=1,
        num_held_out=1,
    )
    assert comparison.worsening("loss", maximize=False) == pytest.approx(0.25)
    assert comparison.worsening("accuracy", maximize=True) == pytest.approx(0.2)


@pytest.mark.parametrize("arguments", [("--best",), ("--checkpoint=x",), ("--model=mine.py:Net",)])
def test_what_is_of_a_run_is_refused_with_a_folder(
    desk: Desk, trained: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    refused = desk.here(*QUANTIZE, str(trained / "export"), f"--out={tmp_path / 'out'}", *arguments)
    assert (refused.code, "a Hugging Face folder has its model alone" in refused.err) == (2, True), refused.err
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_nothing(
    desk: Desk, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unisono.compress import result

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result, "export_run", full)
    refused = desk.here(*QUANTIZE, str(trained), f"--out={tmp_path / 'out'}")
    assert refused.code != 0
    assert "a compressed model is written into a new folder" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_a_model_does_not_start_with_rounded_weights(desk: Desk, trained: Path, tmp_path: Path) -> None:
    assert desk.here(*QUANTIZE, str(trained), f"--out={tmp_path / 'int8'}").code == 0
    refused = desk.train(tmp_path / "run", f"--set=model.weights={tmp_path / 'int8' / 'export'}")
    assert (refused.code, "its weights are quantized" in refused.err) == (2, True), refused.err
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text("")
    refused = desk.train(tmp_path / "run", f"--set=model.weights={tmp_path / 'empty'}")
    assert (refused.code, "the run has no committed checkpoint" in refused.err) == (2, True), refused.err
