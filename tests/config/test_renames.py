"""Keys of earlier versions: read under current names from every source, reported once, never together with the new ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_example import texts

from unisono.config import load_config
from unisono.config.renames import OPTION_VALUES, OPTIONS, PLAN_FIELDS, migrate_plan
from unisono.errors import ConfigError, PlanError
from unisono.plan.options import PlanOptions
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.train.config import RunConfig


def test_every_new_key_is_an_option_and_no_old_one_is() -> None:
    tree = load_config(RunConfig).layout
    known = {*tree.leaves, *tree.sections}
    assert {new for new in OPTIONS.values() if new} <= known
    assert not OPTIONS.keys() & known
    assert OPTION_VALUES.keys() <= known


OLD = {
    "plan.fragments": ("4", "plan.num_fragments", 4),
    "plan.damping": ("true", "plan.staleness_lr_decay", True),
    "model.heads": ("2", "model.num_heads", 2),
    "parts.objective": ('"masked_token"', "components.objective", "masked_token"),
    "data.packing": ('"offsets"', "data.packing", "sliding"),
}


@pytest.mark.parametrize("key", OLD)
@pytest.mark.parametrize("source", ["file", "environment", "override"])
def test_old_keys_are_read(tmp_path: Path, key: str, source: str) -> None:
    text, new, value = OLD[key]
    section, _, name = key.partition(".")
    file = tmp_path / "run.toml"
    file.write_text(f"# one line\n[{section}]\n{name} = {text}\n" if source == "file" else "# nothing\n")
    resolved = load_config(
        RunConfig,
        [file],
        environ={f"UNISONO__{section}__{name}".upper(): text} if source == "environment" else {},
        overrides=[f"{key}={text}"] if source == "override" else [],
    )
    assert resolved.encoded[new] == value
    told = key if section != "parts" else "parts"
    assert [line for line in resolved.renamed if line.startswith(told)] == list(resolved.renamed)
    assert len(resolved.renamed) == 1
    if source == "file":
        assert resolved.origins[new] == f"{file}:3"
    assert resolved.hash == load_config(RunConfig, overrides=[f"{new}={value if value is not True else 'true'}"]).hash


def test_a_file_that_holds_every_option_of_before_loads_to_the_same(tmp_path: Path) -> None:
    """As a run's folder keeps it: each option, by its old name."""
    now = load_config(RunConfig, overrides=["model.num_heads=2", "plan.num_fragments=2", "plan.local_steps=8"])
    lines: list[str] = []
    old = {new: key for key, new in OPTIONS.items() if new}
    for line in now.to_toml().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            line = f"[{old.get(section, section)}]"
        elif " = " in line:
            name, _, value = line.partition(" = ")
            line = f"{old.get(f'{section}.{name}', name).rpartition('.')[2]} = {value}"
        lines.append(line)
    file = tmp_path / "config.toml"
    file.write_text("\n".join(lines) + "\n")
    again = load_config(RunConfig, [file])
    assert again.hash == now.hash  # what is gone was not in it
    assert len(again.renamed) == len([new for new in OPTIONS.values() if new])


def test_an_option_that_is_gone_is_ignored_and_named(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[sample]\nprompt = "x"\ntokens = 0\n[launch]\nnuma = "off"\nthreads = 2\n')
    resolved = load_config(RunConfig, [file])
    assert resolved.value.launch.num_threads == 2
    assert set(resolved.renamed) == {
        "launch.threads → launch.num_threads",
        "launch.numa → nothing (this option is gone)",
        "sample → nothing (this option is gone)",
    }


@pytest.mark.parametrize("source", ["file", "override"])
def test_a_key_in_both_forms_is_an_error(tmp_path: Path, source: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[plan]\nfragments = 2\nnum_fragments = 2\n" if source == "file" else "# nothing\n")
    overrides = ["plan.fragments=2", "plan.num_fragments=2"] if source == "override" else []
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, [file], overrides=overrides)
    old, new = (f"{file}:2", f"{file}:3") if source == "file" else ("--set", "--set")
    assert texts(caught.value) == [
        (
            f"{old}: plan.fragments = 2 together with plan.num_fragments ({new})",
            "plan.fragments is the earlier name of plan.num_fragments, and one source gives an option once",
            "leave plan.fragments out",
        )
    ]


def test_a_new_key_in_a_later_layer_wins_over_an_old_one(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[plan]\nfragments = 2\n")
    assert load_config(RunConfig, [file], overrides=["plan.num_fragments=4"]).value.plan.num_fragments == 4


def test_python_files_give_old_keywords(tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text(
        "from unisono import RunConfig, PlanOptions\n"
        "def config():\n    return RunConfig(plan=PlanOptions(fragments=2, sync='dist_local'))\n"
    )
    resolved = load_config(RunConfig, [file])
    assert resolved.value.plan.num_fragments == 2
    assert resolved.renamed == ("plan.fragments → plan.num_fragments",)
    with pytest.raises(TypeError):
        PlanOptions(fragments=2)  # type: ignore[call-arg]
    file.write_text(file.read_text().replace("fragments=2", "fragments=2, num_fragments=2"))
    with pytest.raises(ConfigError, match=r"PlanOptions\(fragments=2\)"):
        load_config(RunConfig, [file])


V2 = {
    **{"version": 2, "device": "cpu", "pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, "zero": 3},
    **{"shard_threshold_numel": 0, "unsharded": [], "prefetch_blocks": 0, "bucket_bytes": 4194304},
    **{"sequence_parallel": False, "schedule": "1f1b", "splits": [], "weights": [], "placements": []},
    "rules": [
        {"rule": "pair", "module": "a", "column": ["q"], "row": "o", "units": "heads", "shared": ["k"], "enter": "*"},
        {"rule": "embedding", "module": "e"},
    ],
    **{"global_batch": 8, "micro_batch": 4, "accumulation": 1, "precision": "fp32", "dtypes": []},
    **{"recompute": "none", "recompute_modules": [], "recompute_blocks": [], "recompute_keep": [], "offload": False},
    **{"compile": "off", "sync": "dist_local", "compression": "none", "staleness": None, "damping": False},
    **{"local_steps": 16, "outer_lr": 0.7, "outer_momentum": 0.9, "fragments": 4, "overlap_steps": 1},
    **{"gradients": "mean", "tf32": False, "autotune": False, "channels_last": False},
    **{"pins": ["fragments"], "provenance": "derived from settings for 2 ranks"},
}


def test_a_strategy_file_of_version_2_is_the_same_plan() -> None:
    plan = Plan.from_json(V2)
    options = PlanOptions(global_batch=8, sync="dist_local", num_fragments=4, outer_delay_steps=1)
    derived = derive_plan(options, world_size=2, device="cpu", native_bf16=False)
    assert plan.diff(derived).keys() == {"tensor_parallel.rules"}
    pair, table = plan.decisions()["tensor_parallel.rules"]
    assert pair == {
        **{"rule": "colwise_rowwise", "module": "a", "colwise": ["q"], "rowwise": "o", "num_heads_attr": "heads"},
        **{"kv_colwise": ["k"], "input_module": "*"},
    }
    assert table == {"rule": "embedding", "module": "e"}
    assert migrate_plan(V2).values["version"] == 3
    assert set(PLAN_FIELDS) == V2.keys() - {"version", "pins", "provenance"}
    # what a checkpoint of before holds is read to what one of now holds
    before = {name: value for name, value in V2.items() if name not in ("pins", "provenance")}
    assert {**migrate_plan(before).values, "tensor_parallel.rules": []} == derived.decisions()


@pytest.mark.parametrize(
    ("more", "given", "nearest"),
    [
        ({"sync.bucket_bytes": 1}, "the field 'sync.bucket_bytes' of version 3", "bucket_bytes"),
        ({"batch": {"global_batch": 16}}, "the field 'batch' of version 3", "version 3, with all fields in groups"),
        (
            {"rules": [{"rule": "pair", "column": ["a"], "colwise": ["b"]}]},
            "a rule 'pair' with 'colwise' of version 3",
            "column",
        ),
    ],
)
def test_a_plan_of_version_2_with_a_newer_name_is_refused(more: dict[str, object], given: str, nearest: str) -> None:
    with pytest.raises(PlanError) as raised:
        Plan.from_json(V2 | more)
    (problem,) = raised.value.problems
    assert (problem.given, problem.nearest) == (given, nearest)
