"""Every option acts always, or under a condition that its declaration names; set outside of it, it is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from unisono.config import explain, load_config
from unisono.config.fields import option_tree
from unisono.errors import UnisonoError
from unisono.launch.options import SERVER_OPTIONS
from unisono.plan.plan import Plan
from unisono.plan.resolve import derive_plan
from unisono.train.config import RunConfig
from unisono.train.gradient_sync import check_train_options
from unisono.train.setup import backend_notices

ALWAYS = [
    "run.dir",
    "run.seed",
    "run.resume",
    "components.model",
    "components.init",
    "components.objective",
    "components.data",
    "components.transform",
    "components.pair_transform",
    "components.batch_transform",
    "components.collate_fn",
    "components.optimizer",
    "components.schedule",
    "components.metrics",
    "components.own_metrics",
    "components.callbacks",
    "model.pretrained",
    "model.weights",
    "data.cache_dir",
    "data.train",
    "task.kind",
    "loader.num_workers",
    "loader.last_batch",
    "loader.max_bad_sample_frac",
    "plan.file",
    "plan.device",
    "plan.global_batch",
    "plan.micro_batch",
    "plan.dp_shard",
    "plan.tp",
    "plan.cp",
    "plan.pp",
    "plan.ep",
    "plan.precision",
    "plan.recompute",
    "plan.compile",
    "plan.sync",
    "optim.clip_norm",
    "train.steps",
    "train.epochs",
    "train.eval_every_steps",
    "train.num_eval_samples",
    "train.ema_decay",
    "train.spike_sigmas",
    "train.max_skips",
    "train.gc_every_steps",
    "train.gradient_stats_every_steps",
    "distill.teacher",
    "checkpoint.every_steps",
    "checkpoint.keep_last",
    "checkpoint.keep_best",
    "checkpoint.asynchronous",
    "checkpoint.max_failures",
    "checkpoint.upload_to",
    "quantize.scheme",
    "observe.console",
    "observe.trackers",
    "observe.report",
    "observe.monitor_every_s",
    "observe.profile_steps",
    "observe.taps",
    "observe.replay_nonfinite",
    "observe.verify_every_steps",
    "launch.num_processes",
    "launch.num_threads",
    "launch.allocator",
    "launch.max_restarts",
    "launch.timeout_s",
    "launch.grace_s",
]

# option → its value, settings under which it does not act, settings under which it acts, and the ranks of those
IMAGE = ["task.kind=image", "data.train=x"]
TEXT = ["task.kind=text", "data.train=x"]
TABLE = ["task.kind=table", "data.train=x"]
CASES: dict[str, tuple[str, list[str], list[str], int]] = {
    "task.predicts": ("number", [], TEXT, 1),
    "task.inputs": ("['a']", [], TEXT, 1),
    "task.target": ("a", [], TEXT, 1),
    "task.classes": ("['a', 'b']", [], TEXT, 1),
    "task.target_mean": ("1.0", TEXT, [*TEXT, "task.predicts=number", "task.target_std=2.0"], 1),
    "task.target_std": ("1.0", TEXT, [*TEXT, "task.predicts=number", "task.target_mean=2.0"], 1),
    "task.categories": ("['a']", TEXT, TABLE, 1),
    "task.input_mean": ("[1.0]", TEXT, [*TABLE, "task.input_std=[1.0]"], 1),
    "task.input_std": ("[1.0]", TEXT, [*TABLE, "task.input_mean=[1.0]"], 1),
    "task.balance": ("true", [*TEXT, "task.predicts=number"], TEXT, 1),
    "task.mask_frac": ("0.2", [], ["task.kind=masked_language_model"], 1),
    **{
        f"image.{name}": (value, TEXT, IMAGE, 1)
        for name, value in {
            "size": "32",
            "color": "gray",
            "crop": "center",
            "min_crop_frac": "0.5",
            "center_frac": "0.5",
            "flip": "0.1",
            "rotate_degrees": "5",
            "jitter": "0.1",
            "erase": "0.1",
            "mixup_alpha": "0.1",
            "cutmix_alpha": "0.1",
        }.items()
    },
    "image.mean": ("[1, 1, 1]", TEXT, [*IMAGE, "image.std=[1, 1, 1]"], 1),
    "image.std": ("[1, 1, 1]", TEXT, [*IMAGE, "image.mean=[1, 1, 1]"], 1),
    "text.synonyms": ("a.tsv", IMAGE, [*TEXT, "text.replace=0.1"], 1),
    "text.replace": ("0.1", IMAGE, [*TEXT, "text.synonyms=a.tsv"], 1),
    "text.swap": ("0.1", IMAGE, TEXT, 1),
    "text.delete": ("0.1", IMAGE, TEXT, 1),
    "lora.rank": ("4", [], ["model.pretrained=x"], 1),
    "lora.alpha": ("4", ["model.pretrained=x"], ["model.pretrained=x", "lora.rank=4"], 1),
    "lora.dropout": ("0.1", ["model.pretrained=x"], ["model.pretrained=x", "lora.rank=4"], 1),
    "lora.modules": ("['q']", ["model.pretrained=x"], ["model.pretrained=x", "lora.rank=4"], 1),
    "distill.teacher_frac": ("0.25", [], ["distill.teacher=x"], 1),
    "distill.temperature": ("4.0", [], ["distill.teacher=x"], 1),
    "distill.features": ("['a=b']", [], ["distill.teacher=x"], 1),
    "distill.features_weight": (
        "0.1",
        ["distill.teacher=x"],
        ["distill.teacher=x", "distill.features=['a=b']"],
        1,
    ),
    "quantize.group_size": ("64", ["quantize.scheme=int8"], ["quantize.scheme=int4"], 1),
    "quantize.skip": ("['blocks.0.*']", [], ["quantize.scheme=int8"], 1),
    "quantize.aware": ("true", [], ["quantize.scheme=int8"], 1),
    "quantize.backend": ("torchao", ["quantize.scheme=int8", "quantize.aware=true"], ["quantize.scheme=int8"], 1),
    "data.eval": ("y", [], ["data.train=x"], 1),
    "data.weights": ("[1.0, 2.0]", [], ["data.train=['x', 'y']", "data.eval=z"], 1),
    "data.sample_weights": ("balanced", [], ["data.train=x"], 1),
    "data.kept_rows": ("kept", [], ["data.train=x"], 1),
    "data.cache_gib": ("0.5", [], ["data.train=x"], 1),
    "data.bucket_batches": ("4", IMAGE, ["data.train=x"], 1),
    "data.corpus": ("x", TEXT, [], 1),
    "data.text_column": ("text", [], ["data.corpus=x.jsonl"], 1),
    "data.tokenizer": ("x", IMAGE, TEXT, 1),
    "data.seq_len": ("64", IMAGE, TEXT, 1),
    "data.eval_frac": ("0.1", ["data.train=x", "data.eval=y"], TEXT, 1),
    "data.eval_fold": ("1", [], ["data.train=x"], 1),
    "data.eval_split": ("group:a", [], ["data.train=x"], 1),
    "data.boundaries": ("ignore", ["task.kind=masked_language_model"], [], 1),
    "data.packing": ("best_fit", TEXT, [], 1),
    **{f"model.{name}": ("8", IMAGE, [], 1) for name in ("num_layers", "vocab_size")},
    "model.dim": ("64", IMAGE, TEXT, 1),
    "model.num_heads": ("2", TABLE, TEXT, 1),
    "model.num_kv_heads": ("1", TEXT, [], 1),
    "model.ffn_dim": ("64", TABLE, TEXT, 1),
    "model.num_experts": ("4", TEXT, [], 1),
    "model.dropout": ("0.1", IMAGE, TABLE, 1),
    "model.tied": ("false", TEXT, [], 1),
    "model.norm_eps": ("1e-6", TABLE, TEXT, 1),
    "model.rope_theta": ("5000", TEXT, [], 1),
    "model.head_dim": ("8", TEXT, [], 1),
    "model.mup_base_dim": ("64", TEXT, [], 1),
    "model.num_experts_per_token": ("3", [], ["model.num_experts=4"], 1),
    "model.capacity_factor": ("1.5", [], ["model.num_experts=4"], 1),
    "model.balance": ("loss", [], ["model.num_experts=4"], 1),
    "loader.worker_kind": ("thread", ["loader.num_workers=0"], ["loader.num_workers=2"], 1),
    "loader.timeout_s": ("5", ["loader.num_workers=0"], [], 1),
    "plan.zero": ("1", [], ["plan.dp_shard=2"], 2),
    "plan.sequence_parallel": ("true", [], ["plan.tp=2"], 2),
    "plan.schedule": ("gpipe", [], ["plan.pp=2"], 2),
    "plan.offload": ("true", [], [], 0),
    "plan.compression": ("int8", [], [], 2),
    "plan.staleness": ("2", [], ["plan.sync=dist_async"], 1),
    "plan.staleness_lr_decay": ("true", [], ["plan.sync=dist_async"], 1),
    "plan.local_steps": ("4", [], ["plan.sync=dist_local"], 2),
    "plan.outer_lr": ("0.5", [], ["plan.sync=dist_local"], 2),
    "plan.outer_momentum": ("0.5", [], ["plan.sync=dist_local"], 2),
    "plan.num_fragments": ("2", [], ["plan.sync=dist_local"], 2),
    "plan.outer_delay_steps": ("2", [], ["plan.sync=dist_local", "plan.num_fragments=2"], 2),
    "plan.tf32": ("true", [], [], 0),
    "plan.autotune": ("true", [], [], 0),
    "plan.channels_last": ("true", [], [], 0),
    "optim.kind": ("adam", ["components.optimizer=x"], [], 1),
    "optim.lr": ("0.5", ["components.optimizer=x"], [], 1),
    "optim.weight_decay": ("0.5", ["components.optimizer=x"], [], 1),
    "optim.groups": ("[{match = 'a', lr_scale = 2.0}]", ["components.optimizer=x"], [], 1),
    "optim.freeze": ("['a']", ["components.optimizer=x"], [], 1),
    "schedule.kind": ("linear", ["components.schedule=x"], [], 1),
    "schedule.warmup_steps": ("2", ["components.schedule=x"], [], 1),
    "optim.decay_exclude": ("['*.pos']", ["optim.weight_decay=0"], [], 1),
    "optim.beta1": ("0.8", ["optim.kind=sgd"], [], 1),
    "optim.beta2": ("0.8", ["optim.kind=lars"], [], 1),
    "optim.eps": ("1e-6", ["optim.kind=sgd"], [], 1),
    "optim.momentum": ("0.8", [], ["optim.kind=sgd"], 1),
    "optim.nesterov": ("true", [], ["optim.kind=sgd"], 1),
    "optim.trust_coefficient": ("0.01", [], ["optim.kind=lars"], 1),
    "schedule.final_lr_frac": ("0.2", ["schedule.kind=constant"], [], 1),
    "schedule.power": ("1.0", [], ["schedule.kind=polynomial"], 1),
    "schedule.decay_frac": ("0.5", [], ["schedule.kind=wsd"], 1),
    "schedule.step_every_steps": ("10", [], ["schedule.kind=step"], 1),
    "schedule.step_factor": ("0.5", [], ["schedule.kind=step"], 1),
    "train.early_stop_patience": ("2", ["train.eval_every_steps=0"], [], 1),
    "train.loss_scale": ("16", ["plan.precision=fp32"], ["plan.precision=fp16"], 1),
    "checkpoint.keep_every_steps": ("10", ["checkpoint.every_steps=0"], [], 1),
}
OF_SERVERS = {
    f"launch.{name}" for name in (*SERVER_OPTIONS, "tls")
}  # tests/cli/test_bad_input.py, tests/cli/test_tls.py
OF_RANKS = {"launch.collective_backend"}  # tests/dist/test_backends.py
LEAVES = option_tree(RunConfig).leaves


def reported(settings: list[str], ranks: int = 1) -> str:
    """All errors and notices of these settings on a CPU."""
    try:
        config = load_config(RunConfig, overrides=settings).value
        plan = derive_plan(config.plan, world_size=ranks, device="cpu", native_bf16=True)
        check_train_options(plan, config.train)
    except UnisonoError as error:
        return str(error)
    return "\n".join(
        f"{notice['what']}: {notice['why']}" for notice in backend_notices(plan, nn.Linear(2, 2), native_bf16=True)
    )


def test_each_option_is_known_to_act_always_or_names_its_condition() -> None:
    conditional = {key for key, leaf in LEAVES.items() if leaf.spec.applies_with}
    assert conditional == CASES.keys() | OF_SERVERS | OF_RANKS
    assert sorted(set(LEAVES) - conditional) == sorted(ALWAYS)


@pytest.mark.parametrize("key", CASES)
def test_an_option_that_does_not_act_is_reported(key: str) -> None:
    value, outside, inside, ranks = CASES[key]
    assert key.rpartition(".")[2] in reported([f"{key}={value}", *outside])
    if ranks:
        assert reported([f"{key}={value}", *inside], ranks) == ""


@pytest.mark.parametrize("key", CASES)
def test_the_default_is_never_reported(key: str) -> None:
    _, outside, _, _ = CASES[key]
    assert reported(outside) == ""


def test_all_ranks_may_be_one() -> None:
    assert reported(["plan.zero=1", "plan.dp_shard=0"]) == ""


def test_a_resolved_file_with_all_defaults_loads(tmp_path: Path) -> None:
    settings = ["loader.num_workers=0", "train.eval_every_steps=0", "checkpoint.every_steps=0", "optim.kind=sgd"]
    text = load_config(RunConfig, overrides=settings).to_toml()
    assert "zero = 3" in text
    (tmp_path / "config.toml").write_text(text)
    assert load_config(RunConfig, [tmp_path / "config.toml"]).value.optim.kind == "sgd"


def test_explain_names_the_condition() -> None:
    assert "  applies with plan.pp above 1\n" in explain(RunConfig, "plan.schedule")


def test_texts_of_errors() -> None:
    assert reported(["plan.zero=2"]) == (
        "zero 2 with dp_shard 1 x cp 1\n"
        "  rule: it says which part of the state is sharded over the ranks of dp_shard x cp\n"
        "  so:   it would change nothing\n"
        "  try:  plan.dp_shard=2, or leave plan.zero out"
    )
    assert reported(["plan.schedule=zbv"]) == (
        "schedule 'zbv' with pp 1\n"
        "  rule: it orders the passes of the stages of a pipeline\n"
        "  so:   it would change nothing\n"
        "  try:  plan.pp=2, or leave plan.schedule out"
    )
    assert reported(["train.loss_scale=16", "plan.precision=bf16"]) == (
        "train.loss_scale 16 with precision 'bf16'\n"
        "  rule: only fp16 needs a loss scale: its gradients underflow\n"
        "  so:   it would change nothing\n"
        "  try:  plan.precision=fp16, or leave train.loss_scale out"
    )


def test_notices_of_a_device_that_has_what_is_set() -> None:
    options = load_config(
        RunConfig, overrides=["plan.tf32=true", "plan.autotune=true", "plan.channels_last=true"]
    ).value.plan
    plan = derive_plan(options, world_size=1, device="cuda", native_bf16=True)
    assert list(backend_notices(plan, nn.Conv2d(1, 1, 3), native_bf16=True)) == []


def test_bf16_without_hardware_for_it_is_noticed() -> None:
    def plan(precision: str) -> Plan:
        options = load_config(RunConfig, overrides=[f"plan.precision={precision}"]).value.plan
        return derive_plan(options, world_size=1, device="cpu", native_bf16=False)

    (notice,) = backend_notices(plan("bf16"), nn.Linear(2, 2), native_bf16=False)
    assert (notice["code"], notice["cost"]) == ("slow_bf16", "a step is about 2 to 2.7 times slower than in fp32")
    assert list(backend_notices(plan("auto"), nn.Linear(2, 2), native_bf16=False)) == []


@pytest.mark.parametrize(("micro_batch", "parts"), [(0, True), (64, False)])
def test_batch_norm_of_a_part_of_the_batch_is_noticed(micro_batch: int, parts: bool) -> None:
    settings = ["plan.global_batch=64", f"plan.micro_batch={micro_batch}", "plan.precision=fp32"]
    options = load_config(RunConfig, overrides=settings).value.plan
    plan = derive_plan(options, world_size=1, device="cpu", native_bf16=False)
    notices = list(backend_notices(plan, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), native_bf16=False))
    assert [notice["code"] for notice in notices] == (["batch_norm_parts"] if parts else [])
    if parts:
        assert notices[0]["what"] == "batch norm sees 32 samples of each rank at a time, not its share of the step"
        assert notices[0]["fix"] == "plan.micro_batch=64, where it fits into memory"
    assert list(backend_notices(plan, nn.Linear(2, 2), native_bf16=False)) == []
