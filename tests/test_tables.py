"""Figures on pages are those of the result files; each says whether its aim is met and whether its code has changed since."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of what is installed

from benchmarks import compress_table, figures, record, run, tables  # noqa: E402
from benchmarks.figures import Row, at_least, at_most  # noqa: E402
from benchmarks.kvstore import convergence_table  # noqa: E402
from benchmarks.observe import profiler_tables, profilers  # noqa: E402
from benchmarks.observe.faulty import FAULTS  # noqa: E402
from benchmarks.reach import files_of  # noqa: E402
from benchmarks.suite import BENCHMARKS, Benchmark  # noqa: E402

RATIO = {"ratio": 1.0104, "interval": [0.99, 1.03], "confidence": 0.95, "pairs": 40}


def a_run(result: dict[str, Any], **more: Any) -> record.Run:
    return {
        "command": "python -m benchmarks.step_time",
        "date": "2026-11-22T02:07:08+00:00",
        "commit": "07df0efd30f7",
        "machine": {"cpu": "EPYC", "cores": 2},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "load_average": {"before": 0.5, "after": 2.0},
        "result": result,
        **more,
    }


def a_benchmark(*rows: Row) -> Benchmark:
    return Benchmark(name="step_time", title="Step time", text="Against a loop.", rows=rows)


def results(folder: Path, *runs: record.Run, stale: tuple[str, ...] = ()) -> Path:
    record.save(record.Results(name="step_time", runs=list(runs), stale=list(stale)), folder)
    return folder


WALL = Row("{0}: wall", "*/wall", aim=at_most(1.02), headline="Step ÷ a loop")


def a_line(row: Row, result: dict[str, Any]) -> figures.Line:
    (line,) = figures.lines([row], result)
    return line


# --- the pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md", "docs/kvstore.md", "docs/smaller-models.md"])
def test_a_page_has_the_figures_of_the_result_files(page: str) -> None:
    assert (ROOT / page).read_text() == tables.pages()[ROOT / page], "make tables writes it"


def test_a_result_of_changed_code_is_marked() -> None:
    marked = {name: record.load(name).stale for name in tables.stale(BENCHMARKS)}
    assert [name for name, packages in marked.items() if not packages] == [], "python -m benchmarks.tables --mark-stale"


def test_every_headline_is_a_row_of_its_benchmark_alone() -> None:
    headlines = [row.headline for benchmark in BENCHMARKS for row in benchmark.rows if row.headline]
    assert 10 <= len(headlines) <= 14
    assert len(set(headlines)) == len(headlines)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_a_benchmark_reaches_code_of_unisono_and_each_result_has_lines(benchmark: Benchmark) -> None:
    assert len(record.digests(files_of(benchmark.module))) > 1
    for earlier in record.load(benchmark.name).runs[-1:]:
        assert list(figures.lines(benchmark.rows, earlier["result"]))


def test_there_is_a_benchmark_for_every_result() -> None:
    assert {path.stem for path in record.RESULTS.glob("*.json")} <= {benchmark.name for benchmark in BENCHMARKS}


def test_the_digest_of_a_package_changes_with_its_code_alone(tmp_path: Path) -> None:
    module = tmp_path / "src" / "unisono" / "optim" / "lamb.py"
    module.parent.mkdir(parents=True)

    def digest(source: str) -> str:
        module.write_text(source)
        return record.digests([module], tmp_path)["optim"]

    code = 'class Lamb:\n    """Of the paper."""\n\n    def step(self):\n        return "# no comment"\n'
    prose = 'class Lamb:\n    """LAMB.\n\n    Two.\n    """\n    # why\n    def step(self):\n        return "# no comment"\n'
    assert digest(prose) == digest(code)
    assert digest(code.replace("no comment", "another value")) != digest(code)
    assert digest(code.replace("self", "this")) != digest(code)


# --- the files that a benchmark runs ---------------------------------------------------------------------------------


def a_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


TREE = {
    "benchmarks/step_time.py": "import os\nfrom benchmarks import paired\nfrom unisono import Trainer\n",
    "benchmarks/paired.py": "import unisono.errors\n",
    "benchmarks/other.py": "import unisono.measure\n",
    "src/unisono/__init__.py": "import lazy_loader\n",
    "src/unisono/__init__.pyi": "from .train.trainer import Trainer as Trainer\nfrom .measure import PeakFlops as PeakFlops\n",
    "src/unisono/errors.py": "",
    "src/unisono/measure.py": "",
    "src/unisono/train/__init__.py": "",
    "src/unisono/train/trainer.py": "if TYPE_CHECKING:\n    import unisono.measure\ndef run():\n    from unisono import data\n",
    "src/unisono/data/__init__.py": "",
}


def reached(root: Path) -> set[str]:
    files_of.cache_clear()
    return {path.relative_to(root).as_posix() for path in files_of("step_time", root)}


def test_imports_are_followed_to_the_module_that_has_the_name(tmp_path: Path) -> None:
    assert reached(a_tree(tmp_path, TREE)) == {
        *("benchmarks/step_time.py", "benchmarks/paired.py", "src/unisono/__init__.py", "src/unisono/errors.py"),
        *("src/unisono/train/__init__.py", "src/unisono/train/trainer.py", "src/unisono/data/__init__.py"),
    }


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ('Popen([python, "-m", "unisono", "train"])', "src/unisono/__main__.py"),
        ('command = ("-m", "benchmarks.other")', "benchmarks/other.py"),
        ('Contestant(module="benchmarks.other")', "benchmarks/other.py"),
        ('import_module(f"benchmarks.oth{rest}")', "benchmarks/other.py"),
    ],
)
def test_modules_that_are_started_or_imported_by_name_are_followed(script: str, name: str, tmp_path: Path) -> None:
    tree = {**TREE, "src/unisono/__main__.py": ""}
    assert name not in reached(a_tree(tmp_path / "without", tree))
    assert name in reached(a_tree(tmp_path / "with", {**tree, "benchmarks/step_time.py": script + "\n"}))


def test_what_benchmarks_of_this_repository_run() -> None:
    packages = {benchmark.name: set(record.digests(files_of(benchmark.module))) for benchmark in BENCHMARKS}
    assert {"train", "parallel", "kvstore", "cli", "launch"} <= packages["earlier_commit"]
    assert packages["data_images"] >= {"benchmarks", "data", "storage", "errors.py"}
    assert not packages["data_images"] & {"train", "kvstore", "cli"}
    assert packages["kvstore_pushpull"] >= {"kvstore", "launch", "optim", "dist"}


def test_a_script_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"benchmarks\.no_such"):
        files_of("no_such")


# --- lines -----------------------------------------------------------------------------------------------------------


def test_a_line_has_the_median_its_interval_and_whether_the_aim_is_met() -> None:
    line = a_line(WALL, {"one": {"wall": RATIO}})
    assert (line.label, line.figure) == ("one: wall", "1.010 (0.990 to 1.030, 40 pairs)")
    assert tables.aim_of(line) == "≤ 1.02: met"


@pytest.mark.parametrize(
    ("ratio", "aim", "met"), [(1.03, at_most(1.02), False), (1.96, at_least(2), False), (2.01, at_least(2), True)]
)
def test_a_missed_aim_says_so(ratio: float, aim: figures.Aim, met: bool) -> None:
    line = a_line(Row("x", "wall", aim=aim), {"wall": RATIO | {"ratio": ratio}})
    assert line.is_met is met
    assert ("**aim missed**" in tables.aim_of(line)) is not met


def test_an_aim_is_held_against_the_figure_as_shown() -> None:
    line = a_line(Row("x", "wall", aim=at_least(1)), {"wall": RATIO | {"ratio": 0.9998}})
    assert line.figure.startswith("1.000 (")
    assert line.is_met


def test_a_place_is_shown_by_the_first_row_that_leads_there() -> None:
    result = {"axes": {"tp": {"wall": RATIO}, "pp": {"wall": RATIO}}}
    rows = [Row("first", "axes/pp/wall", aim=at_most(1.02)), Row("{0}", "axes/*/wall")]
    assert [(line.label, line.is_met) for line in figures.lines(rows, result)] == [("first", True), ("tp", None)]


def test_a_star_matches_a_part_of_a_key() -> None:
    result = {"unisono 1": {"peak_over_hand 1": 0.9, "peak_over_accelerate 1": 1.0, "bytes": 3}}
    row = Row("unisono{0} / {1}", "unisono*/peak_over_*", figures.number("{:.1f}"))
    shown = [(line.label, line.figure) for line in figures.lines([row], result)]
    assert shown == [("unisono 1 / hand 1", "0.9"), ("unisono 1 / accelerate 1", "1.0")]


# --- the fastest rival -----------------------------------------------------------------------------------------------


def outcome(**rounds: list[float]) -> dict[str, Any]:
    """A contest as ``benchmarks.data.contest`` records it, with ``grain`` as the baseline."""
    from benchmarks.paired import ratio

    rows: dict[str, Any] = {name: {"round_s": seconds} for name, seconds in rounds.items()}
    for name, row in rows.items():
        if name != "grain":
            row["time_over_baseline"] = ratio(rounds[name], rounds["grain"])
    return {"baseline": "grain", "contestants": rows, "not_run": {}}


ROUNDS = {"unisono": [1.0, 2.0, 1.0], "grain": [2.0, 4.4, 2.0], "spdl": [1.5, 3.0, 1.8], "torch": [4.0, 8.0, 4.0]}
FASTEST = Row("x", "", figures.speed_over_fastest("unisono"), aim=at_least(1.6))


def test_the_fastest_rival_is_the_one_of_the_highest_paired_median() -> None:
    line = a_line(FASTEST, outcome(**ROUNDS))
    assert line.figure == "1.500 (1.500 to 1.800, 3 pairs), spdl"
    assert line.is_met is False


@pytest.mark.parametrize(("native", "aim"), [(True, "≥ 2: **aim missed**"), (False, "≥ 2")])
def test_an_aim_of_native_bf16_is_judged_where_bf16_is_native(native: bool, aim: str) -> None:
    row = Row("x", "contestants", figures.fastest_rival_by_default, aim=at_least(2))
    line = a_line(row, {"bf16_native": native, "contestants": {"lightning": {"time_over_baseline": RATIO}}})
    assert line.figure.startswith("1.010 (0.990 to 1.030, 40 pairs), lightning")
    assert ("no native bf16" in line.figure) is not native
    assert tables.aim_of(line) == aim


def test_without_rounds_it_is_the_quotient_of_medians() -> None:
    result = outcome(**ROUNDS)
    for row in result["contestants"].values():
        del row["round_s"]
    assert a_line(FASTEST, result).figure == "1.500, quotient of two paired medians, spdl"


def test_a_rival_that_does_something_else_does_not_count() -> None:
    result = outcome(**ROUNDS)
    result["contestants"]["spdl"]["unlike"] = ["flip"]
    assert a_line(FASTEST, result).figure == "2.000 (2.000 to 2.200, 3 pairs), grain"


def test_the_fastest_framework_is_the_one_of_the_smallest_paired_median() -> None:
    cpu = {"cpu_over_baseline": RATIO}
    rows = {
        "unisono": {},
        "plain": {"time_over_baseline": RATIO | {"ratio": 1.868}, "step_s": 4.37, **cpu},
        "lightning": {"time_over_baseline": RATIO | {"ratio": 1.964}, "step_s": 4.27, **cpu},
    }
    assert a_line(Row("x", "rows", figures.fastest_rival), {"rows": rows}).figure.endswith(
        "1.868 (0.990 to 1.030, 40 pairs), plain"
    )


def test_without_what_it_is_compared_with_an_aim_is_neither_met_nor_missed() -> None:
    result = {"baseline": "limit", "contestants": {"unisono": {"records_per_s": 1000}}}
    row = Row("x", "contestants/*", figures.contestant("records_per_s", "records/s"), aim=at_least(0.8))
    assert tables.aim_of(a_line(row, result)) == "≥ 0.8"


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_new_run_keeps_the_earlier_ones_and_is_what_is_shown(tmp_path: Path) -> None:
    results(tmp_path, a_run({"one": {"wall": RATIO}}), stale=("train",))
    both = record.load("step_time", tmp_path)
    both.add(a_run({"one": {"wall": RATIO | {"ratio": 2.0}}}))
    record.save(both, tmp_path)
    again = record.load("step_time", tmp_path)
    assert [each["result"]["one"]["wall"]["ratio"] for each in again.runs] == [1.0104, 2.0]
    assert again.stale == []
    assert "| one: wall | 2.000 (" in tables.sections([a_benchmark(WALL)], tmp_path)
    assert "Earlier runs in the result file: 1." in tables.sections([a_benchmark(WALL)], tmp_path)


def test_readme_shows_day_commit_and_machine(tmp_path: Path) -> None:
    table = tables.headlines([a_benchmark(WALL)], results(tmp_path, a_run({"one": {"wall": RATIO}})))
    assert (
        "| Step ÷ a loop | 1.010 (0.990 to 1.030, 40 pairs) | ≤ 1.02: met | 2026-11-22, `07df0efd30f7`, EPYC |\n"
        in table
    )
    assert table.endswith("Measured on EPYC, 2 cores, torch 2.13.0, Python 3.11.7.\n")


def test_readme_claims_nothing_of_code_that_has_changed_since(tmp_path: Path) -> None:
    folder = results(tmp_path, a_run({"one": {"wall": RATIO}}), stale=("train", "data"))
    table = tables.headlines([a_benchmark(WALL)], folder)
    assert table.splitlines()[2:] == ["| Step ÷ a loop | not yet re-run | ≤ 1.02 | |"]
    assert "**Not yet re-run**: train, data changed since this run." in tables.sections([a_benchmark(WALL)], folder)


def test_readme_says_what_was_never_run(tmp_path: Path) -> None:
    table = tables.headlines([a_benchmark(WALL)], tmp_path)
    assert "| Step ÷ a loop | not yet run | ≤ 1.02 | |" in table
    assert "Not yet run." in tables.sections([a_benchmark(WALL)], tmp_path)


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="end of figures"):
        tables.between(f"text\n{tables.BEGIN}more\n", "new\n")
    text = tables.between(f"text\n{tables.BEGIN}old\n{tables.END}more\n", "new\n")
    assert text == f"text\n{tables.BEGIN}\nnew\n\n{tables.END}more\n"


def test_a_result_is_stale_once_code_that_it_ran_has_changed(tmp_path: Path) -> None:
    root = a_tree(tmp_path / "root", TREE)
    files_of.cache_clear()
    newest = a_run({"one": {"wall": RATIO}}, sources=record.digests(files_of("step_time", root), root))
    folder = results(tmp_path / "results", newest)
    assert tables.stale([a_benchmark(WALL)], folder, root) == {}
    (root / "src/unisono/measure.py").write_text("x = 2\n")
    assert tables.stale([a_benchmark(WALL)], folder, root) == {}
    (root / "src/unisono/data/__init__.py").write_text("x = 2\n")
    assert tables.stale([a_benchmark(WALL)], folder, root) == {"step_time": ["data"]}
    (root / "benchmarks/paired.py").write_text("import unisono.errors\nx = 2\n")
    assert tables.stale([a_benchmark(WALL)], folder, root) == {"step_time": ["benchmarks", "data"]}


def test_a_run_without_digests_is_stale(tmp_path: Path) -> None:
    root = a_tree(tmp_path / "root", TREE)
    folder = results(tmp_path, a_run({"one": {"wall": RATIO}}))
    assert tables.stale([a_benchmark(WALL)], folder, root)["step_time"][:2] == ["__init__.py", "benchmarks"]


def test_a_run_records_what_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        stdout = json.dumps({"one": 1})

    monkeypatch.setattr(run.subprocess, "run", lambda *given, **more: Answer)
    found = run.run_one(a_benchmark(WALL), quick=True, more=("--blocks=2",))
    assert found["result"] == {"one": 1}
    assert found["command"] == "python -m benchmarks.step_time --blocks=2"
    assert found["sources"] == record.digests(files_of("step_time"))
    assert {"date", "commit", "machine", "versions", "load_average", "wall_s"} <= found.keys()


# --- what profilers say of faulty runs -------------------------------------------------------------------------------

TORCH = """\
---------------  ------------  ------------  ------------
           Name    Self CPU %      Self CPU  Self CPU Mem
---------------  ------------  ------------  ------------
       aten::mm        75.00%       1.500ms      -2.00 KB
     aten::item        25.00%     500.000us           0 B
---------------  ------------  ------------  ------------
Self CPU time total: 2.000ms
"""
ADVANCED = """\
FIT Profiler Report
Profile stats for: run_training_batch rank: 1
   Ordered by: cumulative time

   ncalls  tottime  percall  cumtime  percall filename:lineno(function)
     3/1    0.250    0.083    0.500    0.500 loop.py:1(advance)
"""
SIMPLE = (
    "|  Action\t|  Mean duration (s)\t|  Num calls\t|  Total time (s)\t|  Percentage %\t|\n"
    "|  Total\t|  -\t|  9\t|  3.0\t|  100 %\t|\n|  backward\t|  0.5\t|  4\t|  2.0\t|  66.6\t|\n"
)


def test_rows_of_the_tables_of_profilers() -> None:
    assert profiler_tables.torch_rows(TORCH, "Self CPU") == {"aten::mm": 1.5e-3, "aten::item": pytest.approx(5e-4)}
    assert profiler_tables.torch_rows(TORCH, "Self CPU Mem") == {"aten::mm": -2048, "aten::item": 0}
    assert profiler_tables.advanced_rows(ADVANCED) == {"run_training_batch: loop.py:1(advance)": 0.25}
    assert profiler_tables.simple_rows(SIMPLE) == {"backward": 2.0}


def test_a_top_row_that_healthy_runs_have_too_names_no_cause() -> None:
    usual, slow = ("backward", 0.6), ("[Strategy]DDPStrategy.training_step", 0.7)
    answer = profilers.read_tables("slow compute of rank 1", [usual, slow], [usual, usual])
    assert (answer["cause_right"], answer["rank_right"]) == (True, True)
    answer = profilers.read_tables("slow compute of rank 1", [slow, slow], [usual, usual])
    assert (answer["cause_right"], answer["rank_right"]) == (True, False)
    answer = profilers.read_tables("slow compute of rank 1", [usual, slow], [usual, slow])
    assert (answer["cause_right"], answer["rank_right"]) == (False, False)
    assert profilers.read_tables("dead layer", [usual], [usual])["says"] == "not reported"


def test_a_verdict_names_cause_and_rank_and_nothing_of_a_healthy_run() -> None:
    verdict = profilers.Verdict(cause="DATA02", ranks=(0,), text="DATA02 one rank waits, rank 0")
    answer = profilers.judged("slow loader of rank 1", [verdict], ["DATA02"], "no finding")
    assert answer == {"says": verdict.text, "cause_right": True, "rank_right": False, "false_findings": 0}
    answer = profilers.judged("healthy, 2 processes", [verdict], [], "no finding")
    assert (answer["cause_right"], answer["false_findings"]) == (False, 1)
    said = profilers.judged("healthy, 2 processes", [], [], "no finding")
    assert said == {"says": "no finding", "cause_right": True, "rank_right": None, "false_findings": 0}


def test_what_neither_names_a_fault_nor_follows_from_it_is_a_false_finding() -> None:
    verdicts = [profilers.Verdict(cause=cause, ranks=(), text=cause) for cause in ("COMM01", "COMM02", "DATA01")]
    answer = profilers.judged("slow link", verdicts, ["COMM01"], "no finding")
    assert (answer["cause_right"], answer["false_findings"]) == (True, 1)
    line = a_line(Row("x", "faults/*", figures.answers), {"faults": {"slow link": {"unisono": answer}}})
    assert line.figure == "**unisono**, right, 1 false finding: COMM01; COMM02; DATA01"


def test_only_tools_that_give_verdicts_have_a_number_of_false_findings() -> None:
    result = {"tools": {"unisono": {"false_findings": 2}, "torch.profiler": {"false_findings": None}, "earlier": {}}}
    row = Row("{0}", "tools/*/false_findings", figures.num_false, aim=at_most(0))
    assert [(line.label, line.figure, line.is_met) for line in figures.lines([row], result)] == [
        ("unisono", "2", False)
    ]


def test_a_tool_whose_run_hangs_gives_no_verdict() -> None:
    hang = subprocess.TimeoutExpired(["python"], profilers.HANG_S)
    answer = profilers.without_verdict("skipped collective of rank 1", hang)
    assert (answer["says"], answer["cause_right"]) == ("no verdict (killed after 60 s)", False)
    assert profilers.without_verdict("slow link", hang)["cause_right"] is None


def test_each_fault_has_names() -> None:
    assert {fault for fault in FAULTS if not fault.startswith("healthy")} == set(profilers.NAMES)


# --- docs/kvstore.md -------------------------------------------------------------------------------------------------


def test_what_converges_worse_is_named() -> None:
    plain = {"optimizer": "sgd", "lr": 0.5, "mean": 2.0, "spread": 0.01, "over_plain": 0.0, "ratio": 1.0, "band": 0.02}
    ways = {
        "dist_sync": {**plain, "within_band": True},
        "1bit": {**plain, "mean": 2.3, "over_plain": 0.3, "ratio": 1.15, "within_band": False},
    }
    model = {"parameters": 1000, "steps": 256, "batch": 16, "knowing_nothing": 4.159, "knowing_all": 1.9, "ways": ways}
    section = convergence_table.section({"result": {"models": {"gpt": model}}})
    assert "| dist_sync | sgd, 0.5 | 2.000 ± 0.010 | +0.000, +0.0 % | yes, ≤ 0.020 |" in section
    assert "| 1bit | sgd, 0.5 | 2.300 ± 0.010 | +0.300, +15.0 % | no, > 0.020 |" in section
    assert section.endswith("Outside the band: 1bit (gpt, +15 %).\n")


def test_the_table_of_convergence_says_that_its_code_has_changed() -> None:
    line = tables.not_rerun(record.Results(name="kvstore_convergence", stale=["kvstore"]))
    assert line == "**Not yet re-run**: kvstore changed since this run."
    model = {"parameters": 1, "steps": 1, "batch": 1, "knowing_nothing": 1.0, "knowing_all": 0.0, "ways": {}}
    newest = a_run({"models": {"gpt": model}})
    assert convergence_table.section(newest, line).startswith(line + "\n\n**gpt**")
    assert "Not yet" not in convergence_table.section(newest, "")


def test_the_tables_of_smaller_models_have_a_column_for_each_seed() -> None:
    of_seed = {"mib": {"before": 0.65, "after": 0.36}, "time_ratio": 0.71}
    prune = {
        "seed 0": {"loss": {"whole": 2.0834, "pruned by taylor": 2.293}, **of_seed},
        "seed 1": {"loss": {"whole": 2.0692, "pruned by taylor": 2.419}, **of_seed, "time_ratio": 0.774},
    }
    result = {
        "prune": {"steps": 300, "further_steps": 75, "seeds": prune},
        "aware": {"steps": 500, "further_steps": 100, "seeds": {"seed 0": {"float": 0.8862, "float, int4": 0.89104}}},
    }
    section = compress_table.section(a_run(result), "It has changed.")
    assert section.startswith("It has changed.\n\n")
    assert (
        "\n| | seed 0 | seed 1 |\n|---|---|---|\n| whole | 2.083 | 2.069 |\n| pruned by taylor | 2.293 | 2.419 |\n"
        in section
    )
    assert "from 0.65 MiB to 0.36 MiB, and a forward pass took 0.71 to 0.77 of the time." in section
    assert "\n| float | 0.8862 |\n| float, int4 | 0.8910 |\n" in section


@pytest.mark.parametrize("run", [None, a_run({"models": {}})])
def test_smaller_models_that_were_not_measured_have_no_numbers(run: record.Run | None) -> None:
    assert compress_table.section(run) == "Not measured yet.\n"
