"""Published runs that are in no fit: nothing is fitted to them, they are no other file's rows, and how they are scored."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.planner import fitting, published, unseen
from benchmarks.planner.corrections import network_bytes_per_s
from benchmarks.planner.fitting import ROWS, read_runs
from benchmarks.planner.kept_by_programs import nanotron_cut
from benchmarks.planner.published_memory import bytes_of_tensors, memory_ratios, published_layout, spread
from benchmarks.planner.unseen import UNSEEN

from unisono.planner.layout import Layout, Numbers
from unisono.planner.layout_columns import read_layout
from unisono.planner.peak_memory import ALLOCATOR_FACTOR, peak_memory
from unisono.planner.simulate import predict_rows
from unisono.planner.step_time import Constants, efficiency_key, fitted_constants


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def fitted_to(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The documents of the rows that anything is fitted to from here on."""
    documents: set[str] = set()

    def fit(layouts: Sequence[Layout], measured: Numbers, sources: Sequence[str] = ()) -> Constants:
        assert len(layouts) == len(measured) == len(sources)
        documents.update(sources)
        return fitted_constants()

    for module in (fitting, published):
        monkeypatch.setattr(module, "fit", fit)
    return documents


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The files of rows that are opened from here on."""
    files: set[Path] = set()
    original = Path.open

    def open_path(path: Path, *arguments: object, **options: object) -> object:
        files.add(path)
        return original(path, *arguments, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]

    monkeypatch.setattr(Path, "open", open_path)
    return files


def test_the_fit_of_constants_does_not_open_unseen_rows(
    fitted_to: set[str], opened: set[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fitting, "WRITTEN", tmp_path / "step_time.json")
    fitting.main()
    assert (tmp_path / "step_time.json").exists()
    assert ROWS in opened
    assert UNSEEN not in opened
    assert fitted_to <= {row["source"] for row in rows_of(ROWS)}


def test_the_benchmark_fits_nothing_to_unseen_rows(
    fitted_to: set[str], opened: set[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It scores them in the same process."""
    monkeypatch.setattr(sys, "argv", ["published", "--folds", "2"])
    published.main()
    assert '"unseen"' in capsys.readouterr().out
    assert UNSEEN in opened
    assert fitted_to
    assert not fitted_to & {row["source"] for row in rows_of(UNSEEN)}


def test_no_unseen_row_is_of_a_document_or_run_that_constants_were_fitted_to() -> None:
    def document(row: dict[str, str]) -> str:
        return " ".join(row["source"].split()[:2])

    def speed(run: fitting.PublishedRun) -> tuple[str, int, int, float]:
        return efficiency_key(run.layout), run.layout.num_devices, run.layout.seq_len, round(run.tokens_per_s, 1)

    assert not {document(row) for row in rows_of(UNSEEN)} & {document(row) for row in rows_of(ROWS)}
    assert not {speed(run) for run in read_runs(UNSEEN)[0]} & {speed(run) for run in read_runs()[0]}


def test_unseen_rows_say_what_they_are_of() -> None:
    rows = rows_of(UNSEEN)
    named = ("source", "model", "gpu_type", "gpus", "seq_len", "precision", "notes")
    assert [row for row in rows if not all(row[column] for column in named)] == []
    assert [row["source"] for row in rows if "@" not in row["source"] and "container" not in row["source"]] == []
    assert [row["error"] for row in predict_rows(rows) if row["error"]] == []
    timed = [row for row in rows if row["tokens_per_s_per_gpu"] or row["tflops_per_gpu"]]
    assert len(timed) >= 20
    assert len({row["source"].split()[0] for row in timed}) >= 3
    assert len([row for row in rows if row["peak_mem_gib"]]) >= 10
    assert all(row["peak_mem_gib"] for row in rows if row not in timed)


def test_scores_are_those_of_the_constants_that_ship() -> None:
    """And the guess is that of rows that constants were fitted to."""
    found = unseen.scores()
    rows = [row for row in rows_of(UNSEEN) if row["gpu_type"] == "GB200"]
    off = [
        float(row["tokens_per_s_per_gpu"]) / float(row["pred_tokens_per_s_per_gpu"]) - 1 for row in predict_rows(rows)
    ]
    assert len(rows) == found["devices"]["gb200/fp8"]["rows"]
    assert found["devices"]["gb200/fp8"]["mean"] == pytest.approx(np.mean(np.abs(off)), rel=1e-4)

    def utilization(path: Path) -> Numbers:
        runs = [run for run in read_runs(path)[0] if not run.excluded]
        return np.array([run.utilization for run in runs if efficiency_key(run.layout) == "gb200/fp8"])

    guess = np.abs(utilization(UNSEEN) / np.median(utilization(ROWS)) - 1).mean()
    assert found["devices"]["gb200/fp8"]["guess"] == pytest.approx(guess)
    assert sum(each["rows"] for each in found["devices"].values()) == found["rows"]["compared"]


def test_a_row_says_the_network_that_it_had() -> None:
    assert network_bytes_per_s({"source": "a document", "network_gbit_per_s": "50"}, 25e9) == 50e9 / 8
    assert network_bytes_per_s({"source": "a document", "network_gbit_per_s": ""}, 25e9) == 25e9
    networks = {
        run.layout.device.network_bytes_per_s
        for run in read_runs(UNSEEN)[0]
        if "fms-fsdp" in run.row["source"] and run.layout.device.name == "a100-80"
    }
    assert networks == {50e9 / 8}


def test_peaks_of_tensors_are_compared_without_what_the_allocator_keeps(tmp_path: Path) -> None:
    row = next(row for row in rows_of(UNSEEN) if "reserved at the peak" in row["notes"])
    tensors = {**row, "notes": row["notes"].replace("reserved", "allocated")}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows([row, tensors])
    ((reserved, allocated),) = memory_ratios(path)[0].values()
    assert reserved == pytest.approx(ALLOCATOR_FACTOR * allocated)


def test_tensors_of_one_micro_batch_have_no_gradients_when_the_backward_pass_begins() -> None:
    """Where no buffer holds them. With full recompute the peak is when it ends: all states, and what one block needs."""
    row = {
        "source": "",
        "model": "llama-3-8b",
        "gpu_type": "H100",
        "gpus": "8",
        "fsdp": "8",
        "micro_batch": "2",
        "notes": "",
    }

    def gibibytes(**changes: str) -> tuple[float, float, float]:
        layout = read_layout(row | changes)
        memory = peak_memory([layout])
        values = (bytes_of_tensors(layout), float(memory.counted[0]), float(memory.states[0]))
        return values[0] / 2**30, values[1] / 2**30, values[2] / 2**30

    peak, counted, states = gibibytes()
    assert peak == pytest.approx(counted - states / 4)
    peak, counted, states = gibibytes(gpus="1", fsdp="", precision="bf16-true")
    assert peak == pytest.approx(counted - states / 4)
    for held in ({"global_batch": "32"}, {"fsdp": "", "zero": "1"}):
        peak, counted, _ = gibibytes(**held)
        assert peak == counted
    layout = read_layout(
        row | {"recompute": "full", "seq_len": "128", "gpus": "1", "fsdp": "", "precision": "bf16-true"}
    )
    memory = peak_memory([layout])
    assert bytes_of_tensors(layout) == float((memory.states + memory.recomputed)[0])


def test_what_programs_keep_is_read_with_the_rows_that_they_made() -> None:
    """A cut of nanotron's, whose first ranks have more than their part; the loss that torchtitan compiles since 2025."""
    rows = [row for path in (ROWS, UNSEEN) for row in rows_of(path) if row["peak_mem_gib"]]
    nanotron = [row for row in rows if "nanotron" in row["source"]]
    assert {nanotron_cut(row) for row in nanotron} == {
        (24,),
        (14, 10),
        (7, 7, 6, 4),
        (4, 3, 3, 4, 3, 3, 4, 0),
    }
    layouts = [published_layout(row) for row in nanotron]
    assert {(layout.loss, layout.model.tied, len(layout.keeps)) for layout in layouts} == {("in place", True, 2)}
    ao = [published_layout(row) for row in rows if row["source"].startswith("pytorch/ao docs")]
    assert {(layout.device.name, layout.loss) for layout in ao} == {
        ("h100", "plain"),
        ("mi300x", "fused"),
        ("b200", "fused"),
    }


def test_memory_of_programs_whose_code_says_what_they_keep_is_predicted() -> None:
    """Fitted to are torchtitan's rows on H100, by one factor."""
    fitted, unseen_ratios = memory_ratios()[0], memory_ratios(UNSEEN)[0]
    for name, count in (("torchtitan on h100-hbm2e", 12), ("torchtune on a100-80", 4), ("ao on mi300x", 4)):
        assert len(fitted[name]) == count
        assert spread(fitted[name])["median"] < 0.02
    known = [
        each for name, ratios in unseen_ratios.items() if name.split()[0] in unseen.KNOWN_MEMORY for each in ratios
    ]
    assert len(known) == 19
    assert spread(known)["median"] < 0.08
