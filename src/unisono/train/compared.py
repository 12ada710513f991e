"""Settings of the configuration by what a resume does with them: each option is in one of these lists. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from unisono.config.fields import option_tree
from unisono.sanitize import without_credentials
from unisono.train.config import RunConfig

# Sections and options that the trainer records from what it was given: optimizer, schedule and options of the loop in the
# checkpoint's settings, the plan and its processes in its environment, seed and last batches in its order of samples.
BY_TRAINER = (
    *("components.optimizer", "components.schedule"),
    *("components.collate_fn", "components.pair_transform", "components.batch_transform"),
    *("optim", "schedule", "plan", "run.seed", "loader.last_batch", "loader.max_bad_sample_frac"),
    *("launch.num_processes", "launch.num_threads"),
    *("train.steps", "train.epochs", "train.ema_decay", "train.spike_sigmas"),
    *("train.early_stop_patience", "train.loss_scale"),
    *("distill.teacher_frac", "distill.temperature", "distill.features", "distill.features_weight"),
    *("train.eval_every_steps", "train.num_eval_samples"),  # where the evaluations decide the rate or the end
)
# compared as the configuration has them
BY_CONFIGURATION = (
    *("components.model", "components.init", "components.objective", "components.transform"),
    *("task", "model", "lora", "quantize", "image", "text"),
    *("data.weights", "data.bucket_batches", "data.text_column", "data.tokenizer", "data.seq_len", "data.eval_frac"),
    *("data.eval_fold", "data.eval_split"),
    *("data.boundaries", "data.packing"),
)
# Addresses of data and weights, whose content is compared by fingerprint or by samples.
BY_CONTENT = (
    *("data.train", "data.eval", "data.sample_weights", "data.kept_rows", "data.corpus", "components.data"),
    "distill.teacher",
)
# Folders, speed, memory, what is kept and shown, and limits that end a run with an error: no step is another one.
NOT_COMPARED = (
    *("run.dir", "run.resume", "components.metrics", "components.own_metrics", "components.callbacks"),
    *("data.cache_gib", "data.cache_dir"),
    *("loader.num_workers", "loader.worker_kind", "loader.timeout_s"),
    *("train.max_skips", "train.gc_every_steps", "train.gradient_stats_every_steps", "checkpoint", "observe"),
    *("launch.allocator", "launch.num_servers", "launch.num_replicas", "launch.snapshot_every_s", "launch.tls"),
    *("launch.max_restarts", "launch.timeout_s", "launch.grace_s", "launch.collective_backend"),
)


def in_list(key: str, names: tuple[str, ...]) -> bool:
    """Whether the option ``key`` is one of ``names``, or in a section that is."""
    return key in names or key.partition(".")[0] in names


def compared_settings(config: RunConfig, name_of: Callable[[Any], str]) -> dict[str, Any]:
    """The options of ``BY_CONFIGURATION`` that are not their defaults, as JSON by key; ``name_of`` names a function.

    A new password of an address is no other setting.
    """
    settings: dict[str, Any] = {}
    for key, leaf in option_tree(RunConfig).leaves.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if in_list(key, BY_CONFIGURATION) and value != leaf.default:
            settings[key] = name_of(value) if callable(value) else _plain(value)
    return settings


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    return without_credentials(value) if isinstance(value, str) else value
