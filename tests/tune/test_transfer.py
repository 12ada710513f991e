"""A narrow model that is searched with for a wide one: widths, settings that transfer, the file of the best trial, pages."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import ConfigError
from unisono.tune.best import write_best
from unisono.tune.coordinates import CoordinateCheck, read_coordinates, write_coordinates
from unisono.tune.lr_range import analyze_range, write_range_page
from unisono.tune.search_page import write_search_page
from unisono.tune.space import read_space
from unisono.tune.study import StudyOptions, TrialRecord
from unisono.tune.transfer import WidthTransfer, check_coordinates, chosen_width, require_transferred, width_transfer

SETTINGS = {
    "model.dim": 256,
    "model.num_heads": 16,
    "model.num_kv_heads": 8,
    "model.ffn_dim": 768,
    "model.mup_base_dim": 0,
}


def check(slope: float = 0.0, base_dim: int = 64, widths: tuple[int, ...] = (64, 128, 256)) -> CoordinateCheck:
    changes = {"logits": [0.1 * width**slope for width in widths], "blocks.0": [0.2] * len(widths)}
    return CoordinateCheck(base_dim=base_dim, widths=widths, steps=8, changes=changes)


def test_both_models() -> None:
    transfer = width_transfer(SETTINGS, 64)
    assert list(transfer.proxy.values()) == [64, 4, 2, 192, 64]
    assert list(transfer.full.values()) == [256, 16, 8, 768, 64]
    assert transfer.proxy_overrides()[0] == "model.dim=64"
    assert transfer.proxy_overrides()[-1] == "model.mup_base_dim=64"
    assert transfer.check_widths == [64, 128, 256]
    assert transfer.to_json()["coordinates"] is None
    assert not transfer.holds


def test_the_width_is_that_of_the_option_or_of_the_configuration() -> None:
    assert chosen_width(SETTINGS, 64) == 64
    assert chosen_width({**SETTINGS, "model.mup_base_dim": 32}, None) == 32
    assert chosen_width({**SETTINGS, "model.mup_base_dim": 32}, 32) == 32


@pytest.mark.parametrize(
    ("changes", "width", "words"),
    [
        ({}, None, ["--transfer mup without --proxy-width", "--proxy-width 64"]),
        ({"model.num_kv_heads": 1}, None, ["more key/value heads"]),
        ({}, 256, ["from width 256 to a model of dim 256", "--proxy-width 64"]),
        ({"model.mup_base_dim": 32}, 64, ["--proxy-width 64 with model.mup_base_dim=32", "model.mup_base_dim=64"]),
    ],
)
def test_a_width_that_is_refused(changes: dict[str, int], width: int | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen_width({**SETTINGS, **changes}, width)
    for word in words:
        assert word in str(refused.value)


def test_settings_that_transfer() -> None:
    require_transferred(["optim.lr", "optim.beta2", "optim.momentum", "schedule.warmup_steps", "schedule.kind"])
    with pytest.raises(ConfigError) as refused:
        require_transferred(["optim.lr", "optim.weight_decay", "model.num_layers"])
    assert [problem.given.split()[1] for problem in refused.value.problems] == [
        "optim.weight_decay",
        "model.num_layers",
    ]
    assert "--space optim.weight_decay=" in str(refused.value)


def record(tmp_path: Path) -> TrialRecord:
    return TrialRecord(
        number=2,
        settings={"optim.lr": "0.003"},
        outcome="done",
        value=1.5,
        took_s=1.0,
        device_s=1.0,
        reason="",
        run_dir=tmp_path / "trials" / "0002",
    )


def test_the_best_file_has_the_wide_model(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"trials/0002/config\.toml, the configuration of the best trial, which is missing"
    ):
        write_best(tmp_path / "best.toml", record(tmp_path), {})
    assert not (tmp_path / "best.toml").exists()
    (tmp_path / "trials" / "0002").mkdir(parents=True)
    (tmp_path / "trials" / "0002" / "config.toml").touch()
    write_best(tmp_path / "best.toml", record(tmp_path), width_transfer(SETTINGS, 64).full)
    settings: dict[str, Any] = tomllib.loads((tmp_path / "best.toml").read_text())
    sizes = {"dim": 256, "num_heads": 16, "num_kv_heads": 8, "ffn_dim": 768, "mup_base_dim": 64}
    assert settings["model"] == sizes
    assert settings["optim"] == {"lr": 0.003}
    write_best(tmp_path / "best.toml", record(tmp_path), {})
    assert "model" not in tomllib.loads((tmp_path / "best.toml").read_text())


@pytest.mark.parametrize(
    ("slope", "words"),
    [
        (0.0, "Searched at width 64, for width 256 with model.mup_base_dim=64."),
        (1.0, "No trial was started: a learning rate that is right at width 64 would not be right at width 256."),
    ],
)
def test_pages_say_both_widths(tmp_path: Path, slope: float, words: str) -> None:
    transfer = replace(width_transfer(SETTINGS, 64), check=check(slope))
    assert transfer.holds == (slope == 0.0)
    records = [record(tmp_path)]
    write_search_page(
        tmp_path / "search.html",
        read_space(["optim.lr=log:1e-4..1e-2"]),
        StudyOptions(),
        records,
        records[0],
        {},
        transfer,
    )
    rates = [1e-6 * 1.2**step for step in range(30)]
    write_range_page(tmp_path / "range.html", analyze_range(rates, [3.0 - 0.01 * step for step in range(30)]), transfer)
    for name in ("search.html", "range.html"):
        page = (tmp_path / name).read_text()
        assert words in page
        assert f'<td class="key">logits</td><td>{slope:.2f}</td>' in page


@pytest.mark.parametrize("value", [0.25, math.nan])
def test_a_check_is_read_as_it_was_written(tmp_path: Path, value: float) -> None:
    found = CoordinateCheck(base_dim=64, widths=[64, 128, 256], steps=8, changes={"logits": [0.1, 0.2, value]})
    write_coordinates(tmp_path, found)
    again = read_coordinates(tmp_path)
    assert repr(again) == repr(found)
    assert again.is_flat == found.is_flat


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"base_dim": 64, "widths": [64], "steps": 8, "changes": {"a": [1.0, 2.0]}}']
)
def test_a_damaged_check(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match="no report of a coordinate check"):
        read_coordinates(tmp_path)


def test_a_check_of_the_folder_is_taken_if_its_widths_are_those_of_the_search(tmp_path: Path) -> None:
    folder = tmp_path / "coordinates"
    folder.mkdir()
    transfer: WidthTransfer = width_transfer(SETTINGS, 64)
    write_coordinates(folder, check())
    assert check_coordinates(folder, ["--no-such-option"], transfer).is_flat
    for other in (check(base_dim=32), check(widths=(32, 64, 128))):
        write_coordinates(folder, other)
        with pytest.raises(ConfigError, match="a coordinate check of other widths"):
            check_coordinates(folder, ["--no-such-option"], transfer)


def test_a_check_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_coordinates(tmp_path / "coordinates", ["--set=optim.lrr=1"], width_transfer(SETTINGS, 64))
    (problem,) = refused.value.problems
    assert "the coordinate check of widths 64,128,256: " in problem.given
    assert "optim.lrr" in problem.given
