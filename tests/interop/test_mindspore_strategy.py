"""Strategy files and settings of MindSpore become plans, which are checked and trained; MindSpore reads the same files alike."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore_strategies as made
import pytest
from commands import Desk, losses_of, make_desk, steps_of
from tools import peer

from unisono.errors import ConfigError, PlanError
from unisono.interop.mindspore_plan import ImportedPlan, imported_plan, parse_settings
from unisono.interop.mindspore_strategy import StrategyFile, read_strategies

MEAN = "gradients_mean=True"


def read(tmp_path: Path, content: dict[str, Any]) -> StrategyFile:
    return read_strategies(made.write(tmp_path / "strategy.json", content))


def imported(tmp_path: Path, *contents: dict[str, Any], context: tuple[str, ...] = (MEAN,)) -> ImportedPlan:
    return imported_plan([read(tmp_path, content) for content in contents], parse_settings(context))


def mesh(pp: int, dp_replicate: int, dp_shard: int, tp: int) -> dict[str, int]:
    return {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}


def subjects(plan: ImportedPlan) -> list[str]:
    assert all(reason for _, reason in plan.notes)
    return [subject for subject, _ in plan.notes]


# --- files -------------------------------------------------------------------------------------------------------------


def test_both_forms_of_a_file_are_the_same(tmp_path: Path) -> None:
    content = made.strategy(dp=4, tp=2, shard=4)
    (tmp_path / "strategy.ckpt").write_bytes(made.protobuf(content))
    whole = read(tmp_path, content)
    assert read_strategies(tmp_path / "strategy.ckpt") == whole
    up = next(layout for layout in whole.layouts if layout.name == "layers.1.up.weight")
    assert (up.num_devices, up.cuts, up.shard_size) == (8, (2, 1), 4)


def test_a_dim_that_two_axes_cut(tmp_path: Path) -> None:
    content = made.strategy()
    content["parallel_layout_item"]["layers.0.up.weight"]["tensor_map"] = [[0, 1], -1]
    assert read(tmp_path, content).layouts[0].cuts == (4, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parallel_strategy_item": {}, "parallel_layout_item": {}}, "it holds no strategies"),
        ({"current_stage": "0"}, "current_stage is no whole number"),
        ({"current_stage": -1}, "current_stage is '-1', where 0 to 1,048,576 are possible"),
        ({"parallel_strategy_item": []}, "parallel_strategy_item is no object"),
        ({"parallel_strategy_item": {"MatMul_a": 3}}, "'MatMul_a' in parallel_strategy_item is no object"),
        ({"parallel_strategy_item": {"a": {"stage": 0, "parallel_strategy": [[0]]}}}, "strategy of 'a' is '0'"),
        ({"parallel_strategy_item": {"a": {"stage": 0, "parallel_strategy": [[2**20, 2]]}}}, "strategy of 'a' is '2097152'"),
        ({"parallel_layout_item": {"a": {"dev_matrix": [2], "tensor_map": [1]}}}, "names an axis that dev_matrix has not"),
        ({"parallel_layout_item": {"a": {"dev_matrix": [2.0], "tensor_map": [0]}}}, "dev_matrix of 'a' is no whole number"),
        ({"parallel_layout_item": {"a": {"dev_matrix": [2], "tensor_map": [0] * 65}}}, "'a' has more than 64 dims"),
    ],
)  # fmt: skip
def test_a_file_that_is_none(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        read(tmp_path, made.strategy() | change)
    (problem,) = caught.value.problems
    assert problem.given.startswith(f"strategy file of MindSpore {tmp_path}/strategy.json: ")
    assert reason in problem.given


def test_bytes_that_are_no_strategy(tmp_path: Path) -> None:
    for content in (b"", b"\x08", b"\x22\x01a", made.protobuf(made.strategy())[:-3], b"{"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(PlanError, match="strategy file of MindSpore"):
            read_strategies(tmp_path / "x")
    with pytest.raises(PlanError, match="No such file"):
        read_strategies(tmp_path / "absent")


# --- what files and settings come to -----------------------------------------------------------------------------------


def test_data_and_tensor_parallelism(tmp_path: Path) -> None:
    plan = imported(tmp_path, made.strategy(dp=2, tp=2))
    assert plan == ImportedPlan(fields={"mesh": mesh(1, 2, 1, 2)}, num_ranks=4, notes=[])


def test_sequence_parallelism_is_seen_in_norms(tmp_path: Path) -> None:
    plan = imported(tmp_path, made.strategy(dp=2, tp=4, sequence=True))
    assert plan.fields == {"mesh": mesh(1, 2, 1, 4), "tensor_parallel": {"sequence_parallel": True}}


def test_layouts_alone_have_the_degree_too(tmp_path: Path) -> None:
    content = made.strategy(dp=2, tp=4) | {"parallel_strategy_item": {}}
    assert imported(tmp_path, content).fields["mesh"] == mesh(1, 2, 1, 4)


@pytest.mark.parametrize(("level", "zero"), [("level1", 1), ("level2", 2), ("level3", 3)])
def test_optimizer_sharding(level: str, zero: int, tmp_path: Path) -> None:
    context = (MEAN, f"parallel_optimizer_config={{'optimizer_level': '{level}', 'parallel_optimizer_threshold': 24}}")
    plan = imported(tmp_path, made.strategy(dp=4, tp=2, shard=2), context=context)
    assert plan.fields == {"mesh": mesh(1, 2, 2, 2), "fsdp": {"zero": zero, "shard_threshold_numel": 6144}}
    assert subjects(plan) == ([] if zero == 3 else [f"optimizer_level={level}"])
    assert imported(tmp_path, made.strategy(dp=4, tp=2, shard=-1)).fields["mesh"] == mesh(1, 1, 4, 2)


def test_settings_alone(tmp_path: Path) -> None:
    plan = imported_plan(
        [],
        parse_settings(
            ["parallel_mode=data_parallel", "device_num=4", "enable_parallel_optimizer=True", "threshold=0"]
        ),
    )
    assert plan.fields == {"mesh": mesh(1, 1, 4, 1), "fsdp": {"zero": 1, "shard_threshold_numel": 0}}
    assert subjects(plan) == ["gradients_mean=False, the default", "optimizer_level=level1"]
    assert "multiply the learning rate by 4" in plan.notes[0][1]
    assert imported_plan([], parse_settings(["parallel_mode=stand_alone"])).num_ranks == 1


def test_stages_of_several_files_and_of_a_merged_one(tmp_path: Path) -> None:
    contents = [made.strategy(dp=1, tp=2, stage=stage, layers=range(2 * stage, 2 * stage + 2)) for stage in (0, 1)]
    plan = imported(tmp_path, *contents)
    assert plan.fields == {"mesh": mesh(2, 1, 1, 2), "pipeline": {"schedule": "1f1b"}, "batch": {"accumulation": 2}}
    assert plan.num_ranks == 4
    assert imported(tmp_path, made.merged(*contents)) == plan
    settings = ("stages=2", "interleave=True", "micro_size=8", "device_num=4")
    set_too = imported(tmp_path, contents[0], context=settings)
    assert set_too.fields["pipeline"] == {"schedule": "interleaved"}
    assert set_too.fields["batch"] == {"accumulation": 8}
    alone = imported(tmp_path, contents[1])
    assert alone.fields["mesh"] == mesh(2, 1, 1, 2)
    assert subjects(alone)[0] == "stages 1"


def test_what_a_plan_cannot_say_is_listed(tmp_path: Path) -> None:
    content = made.strategy(dp=2, tp=2)
    operators, layouts = content["parallel_strategy_item"], content["parallel_layout_item"]
    operators["MatMul_layers.0.up.weight"]["parallel_strategy"] = [[1, 1], [1, 1]]
    operators["MatMul_layers.1.up.weight"]["parallel_strategy"] = [[2, 1, 2], [2, 1]]
    layouts["embedding"] = {"dev_matrix": [4], "tensor_map": [0, -1]}
    settings = ("full_batch=True", "search_mode=recursive_programming", "comm_fusion={'allreduce': {'mode': 'auto'}}")
    plan = imported(tmp_path, content, context=settings)
    assert plan.fields["mesh"] == mesh(1, 2, 1, 2)
    assert subjects(plan) == [
        "search_mode='recursive_programming'",
        "comm_fusion={'allreduce': {'mode': 'auto'}}",
        "weights that are whole: layers.0.up.weight",
        "parameters cut otherwise than in 2: embedding",
        "samples in 1 parts",
        "full_batch",
        "gradients_mean=False, the default",
    ]


def test_numbers_that_contradict_each_other_make_no_plan(tmp_path: Path) -> None:
    def problems(content: dict[str, Any], *context: str) -> list[str]:
        with pytest.raises(PlanError) as caught:
            imported(tmp_path, content, context=context)
        return [problem.given for problem in caught.value.problems]

    two = made.strategy(dp=2, tp=4)
    two["parallel_strategy_item"]["MatMul_layers.0.up.weight"]["parallel_strategy"] = [[4, 1], [2, 1]]
    assert problems(two) == [
        "weights cut in 2 (layers.0.up.weight) and in 4 (layers.0.down.weight, layers.1.up.weight, layers.1.down.weight)"
    ]
    assert problems(made.strategy(), "device_num=8") == ["device_num=8 with 1 stage of 4 devices"]
    assert problems(made.strategy(dp=4, shard=3)) == ["optimizer states shared by 3 of 4 data ranks"]
    assert problems(made.strategy(stage=2), "pipeline_stages=2") == ["pipeline_stages=2, and a strategy of stage 2"]
    uneven = made.strategy()
    uneven["parallel_layout_item"]["x"] = {"dev_matrix": [8], "tensor_map": [-1]}
    assert problems(uneven) == ["parameters laid out on 4, 8 devices"]
    assert problems(made.strategy() | {"parallel_layout_item": {}}) == [
        "neither a layout of a parameter nor device_num"
    ]


def test_settings_that_are_none() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(
            [
                "device_nums=4",
                "device_num=four",
                "pipeline_stages=0",
                "parallel_mode=hybrid_parallel",
                "gradients_mean=1",
            ]
        )
    given = [problem.given for problem in caught.value.problems]
    assert given == [
        "--context device_nums=4",
        "--context device_num='four'",
        "--context pipeline_stages=0",
        "--context gradients_mean=1",
        "--context parallel_mode='hybrid_parallel'",
    ]
    assert caught.value.problems[0].nearest == "did you mean 'device_num'?"
    with pytest.raises(ConfigError, match="it is a dict of settings"):
        parse_settings(["pipeline_config=gpipe"])
    with pytest.raises(ConfigError, match="of MindSpore's schedules gpipe, 1f1b, zero_bubble_v are here too"):
        parse_settings(["pipeline_config={'pipeline_scheduler': 'seqpipe'}"])


# --- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("desk")
    return make_desk(folder, folder / "cache")


def test_the_command_writes_a_plan_that_is_legal(desk: Desk, tmp_path: Path) -> None:
    file = made.write(tmp_path / "strategy.json", made.strategy(dp=2, tp=2, shard=2))
    output = tmp_path / "plan.json"
    arguments = ["plan", "import", str(file), "--context", MEAN, "--output", str(output)]
    done = desk.here(*arguments, "--json")
    assert done.code == 0, done.err
    assert done.json["processes"] == 4
    assert json.loads(output.read_text()) == done.json["fields"] == {"mesh": mesh(1, 1, 2, 2), "fsdp": {"zero": 1}}
    assert [note["subject"] for note in done.json["notes"]] == [
        "optimizer_level=level1",
        "parallel_optimizer_threshold, the default",
    ]
    checked = desk.here("plan", "check", str(output))
    assert checked.out.startswith("a legal plan for 4 processes"), checked.err
    again = desk.here(*arguments)
    assert again.code == 2
    assert "a file that exists is not overwritten" in again.err
    text = desk.here(*arguments, "--force").out
    assert text.startswith(f"wrote {output}, for 4 processes: 4 x cpu, state over 2 (ZeRO 1), tp 2, ")
    assert "- optimizer_level=level1: ZeRO 1: " in text
    assert desk.here("plan", "import", "--output", str(tmp_path / "other")).code == 2


def test_nothing_is_written_where_a_file_cannot_be_read(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    done = desk.here("plan", "import", str(tmp_path / "bad.json"), "--output", str(tmp_path / "plan.json"))
    assert done.code == 2
    assert "current_stage is no whole number" in done.err
    assert not (tmp_path / "plan.json").exists()


RUNS = {
    "tensor and data": ((made.strategy(dp=2, tp=2, shard=2),), (MEAN, "optimizer_level=level3"), 4),
    "pipeline": (tuple(made.strategy(dp=1, tp=1, stage=n, layers=range(n, n + 1)) for n in (0, 1)), (MEAN,), 2),
    "sequence": ((made.strategy(dp=1, tp=2, sequence=True),), (MEAN,), 2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_an_imported_plan_trains_like_one_process(name: str, desk: Desk, tmp_path: Path) -> None:
    contents, context, ranks = RUNS[name]
    files = [made.write(tmp_path / f"{n}.json", content) for n, content in enumerate(contents)]
    settings = [word for each in context for word in ("--context", each)]
    output = tmp_path / "plan.json"
    written = desk.here("plan", "import", *map(str, files), *settings, "--output", str(output))
    assert written.code == 0, written.err
    sizes = [f"--set=model.{each}" for each in ("num_layers=2", "num_kv_heads=2")]
    many = [f"--set=run.dir={tmp_path}/many", f"--set=launch.num_processes={ranks}", "--plan", str(output)]
    done = desk.process("train", *desk.settings, *sizes, *many)
    assert done.code == 0, done.err
    one = desk.here("train", "--debug", *desk.settings, *sizes, f"--set=run.dir={tmp_path}/one")
    assert one.code == 0, one.err
    assert len(steps_of(tmp_path / "many")) == 4
    assert losses_of(tmp_path / "many") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)


# --- MindSpore itself --------------------------------------------------------------------------------------------------

THERE = """
import json, sys
from mindspore.parallel import _parallel_serialization as there
from mindspore.train import node_strategy_pb2

content = json.load(open(sys.argv[1]))
lists = there._convert_to_list(there._build_searched_strategy(sys.argv[1]))
whole = node_strategy_pb2.ParallelStrategyMap(current_stage=content["current_stage"])
for name, item in content["parallel_strategy_item"].items():
    entry = whole.parallel_strategy_item.add(node_name=name)
    entry.parallel_strategys.stage = item["stage"]
    for dims in item["parallel_strategy"]:
        entry.parallel_strategys.parallel_strategy.add().dim.extend(dims)
for name, layout in there._build_json_strategy(sys.argv[1]).items():
    entry = whole.parallel_layout_item.add(param_name=name)
    entry.parallel_layouts.CopyFrom(layout)
open(sys.argv[2], "wb").write(whole.SerializeToString())
from_protobuf = there._convert_to_list(there._build_searched_strategy(sys.argv[2]))
print(json.dumps([lists, from_protobuf], default=int))
"""


@pytest.mark.peer
def test_mindspore_reads_the_json_alike_and_writes_the_protobuf_that_is_read(tmp_path: Path) -> None:
    """MindSpore 2.10 itself cannot save a strategy without an Ascend device; its reader and its messages are in the package."""
    content = made.strategy(dp=4, tp=2, shard=4)
    file, written = made.write(tmp_path / "strategy.json", content), tmp_path / "strategy.ckpt"
    python = peer("UNISONO_MINDSPORE_PYTHON")
    done = subprocess.run([python, "-c", THERE, str(file), str(written)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, from_protobuf = json.loads(done.stdout.splitlines()[-1])
    assert theirs == from_protobuf
    ours = read_strategies(file)
    for layout in ours.layouts:
        dev_matrix, tensor_map, _, _, _, shard_size, _ = theirs[layout.name]
        assert layout.num_devices == dev_matrix[0] * dev_matrix[1]
        assert layout.cuts == tuple(1 if axis < 0 else dev_matrix[-1 - axis] for axis in tensor_map)
        assert layout.shard_size == shard_size
    assert theirs.keys() == {layout.name for layout in ours.layouts}
    assert replace(read_strategies(written), stage=ours.stage) == ours


@pytest.mark.parametrize(
    ("encoding", "said"),
    [("utf-8-sig", "it begins with a byte order mark"), ("utf-16", "it is UTF-16, not UTF-8")],
)
def test_the_encoding_of_a_text_that_is_not_read_is_said(tmp_path: Path, encoding: str, said: str) -> None:
    file = tmp_path / "strategy.json"
    file.write_bytes(json.dumps(made.strategy(dp=4, tp=2, shard=4)).encode(encoding))
    with pytest.raises(PlanError, match=said):
        read_strategies(file)


def test_a_plan_does_not_replace_the_strategy_that_it_is_made_of(tmp_path: Path) -> None:
    file = made.write(tmp_path / "strategy.json", made.strategy(dp=4, tp=2, shard=4))
    (tmp_path / "link.json").symlink_to(file)
    before = file.read_bytes()
    desk = make_desk(tmp_path / "desk", tmp_path / "cache")
    for output in (file, tmp_path / "link.json"):
        done = desk.here("plan", "import", str(file), "--output", str(output), "--force")
        assert (done.code, "does not replace a file that it is made of" in done.err) == (2, True), done.err
    assert file.read_bytes() == before
