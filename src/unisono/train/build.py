"""Builds a trainer from a configuration: a component is built in, an installed entry point, or the user's own callable."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from unisono.config import Resolved
from unisono.data.dataset import Batch, CollateFn, Dataset, as_dataset
from unisono.data.loading.batch_builder import PairTransform, Transform
from unisono.data.sources.remote import local_path
from unisono.data.tokens.tokenized_cache import PreparedCorpus, prepare_corpus
from unisono.data.tokens.tokenizer import BYTES, Tokenizer, check_vocab, load_tokenizer, tokenizer_file
from unisono.data.tokens.windows import TokenWindows
from unisono.dist import World, on_first_rank
from unisono.errors import ConfigError, DataError, nearest_name
from unisono.interop.initial_weights import load_weights
from unisono.measure.flops import matmul_params, transformer_flops_per_token
from unisono.models.gpt import GPT
from unisono.models.moe import inactive_parameters
from unisono.models.quantized_model import make_aware, make_stored
from unisono.observe.events import EventLog
from unisono.plan.plan import Plan
from unisono.tasks.columns import number_columns, resolve_task
from unisono.tasks.data import HeldOutRows, language_data, predictor_data
from unisono.tasks.inputs import image_augment
from unisono.tasks.model_names import MODELS, default_model
from unisono.tasks.models import build_named
from unisono.tasks.notices import cut_notice, found_notices
from unisono.tasks.options import LANGUAGE_MODELS, TaskOptions, updated_task
from unisono.tasks.pretrained_folder import refuse_other_tokenizer
from unisono.tasks.sources import cache_folder
from unisono.train.callbacks import Every
from unisono.train.compared import compared_settings
from unisono.train.config import AUTO, RunConfig
from unisono.train.distillation import Distillation
from unisono.train.initialize import initialize
from unisono.train.input_pipeline import with_steps
from unisono.train.metric_kinds import metric_classes
from unisono.train.metrics import METRICS, Metric, find_metric
from unisono.train.objectives import OBJECTIVES, Objective
from unisono.train.settings import function_name
from unisono.train.stored_trial import checked_model
from unisono.train.trainer import Trainer

TOKENS = "tokens"
TEXT_TASKS = (*LANGUAGE_MODELS, "text", "sequence_labelling")
TASK_FIELDS = tuple(field.name for field in fields(TaskOptions))
DEFAULT_BUCKETS = 4096  # rows of a table model's categories
MAX_F1_CLASSES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The data sets of a run, and what its loader does with samples.

    Attributes:
        train: Training samples.
        held_out: Held-out samples.
        prepared: The tokenized corpus; None if samples are read from ``data.train`` or are the user's own.
        tokenizer: Tokenizer of texts; None for other data and the user's own.
        transform: ``(sample, rng) -> sample`` of training samples, or None.
        pair_transform: Of two training samples, or None.
        collate_fn: ``(samples) -> batch`` of both data sets, or None.
        held_out_rows: Which samples of its files the held-out ones are; None of windows of tokens and the user's own data.
    """

    train: Dataset
    held_out: Dataset
    prepared: PreparedCorpus | None = None
    tokenizer: Tokenizer | None = None
    transform: Transform | None = None
    pair_transform: PairTransform | None = None
    collate_fn: CollateFn | None = None
    held_out_rows: HeldOutRows | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the preparation of a corpus, for the record of the run."""
        return asdict(self.prepared.report) if self.prepared else {}


def has_own_data(config: RunConfig) -> bool:
    """Whether the data are the user's own: a callable or an entry point."""
    return config.components.data not in (AUTO, TOKENS)


def resolve_run(resolved: Resolved[RunConfig], world: World) -> Resolved[RunConfig]:
    """The configuration with the classes and statistics that its task leaves open; rank 0 reads them from the training data.

    Raises DataError on all ranks if the data do not fit the task.
    """
    config = resolved.value
    if has_own_data(config) or config.task.kind in LANGUAGE_MODELS:
        return resolved

    def find() -> dict[str, Any]:
        task = resolve_task(config.task, config.data)
        changed = [name for name in TASK_FIELDS if getattr(task, name) != getattr(config.task, name)]
        return {name: getattr(task, name) for name in changed}

    found = on_first_rank(world, find)
    if not found:
        return resolved
    task = updated_task(config.task, found)
    keys = [f"task.{name}" for name in found]
    return resolved.updated(replace(config, task=task), keys, "data.train")


def resolve_steps(resolved: Resolved[RunConfig], data: RunData, plan: Plan) -> Resolved[RunConfig]:
    """The configuration with the steps of its epochs in place of ``train.epochs``."""
    config = resolved.value
    train = with_steps(config.train, data.train, config.loader.last_batch, plan.batch.global_batch)
    if train is config.train:
        return resolved
    origin = f"train.epochs = {config.train.epochs:g}"
    return resolved.updated(replace(config, train=train), ("train.steps", "train.epochs"), origin)


def build_data(config: RunConfig, *, held_out_only: bool = False) -> RunData:
    """The data sets of the configuration's task or of ``components.data``. Raises DataError or ConfigError.

    With ``held_out_only``, a task with ``data.eval`` does not open its training data: ``train`` is the held-out data too.
    """
    data = _own_data(config) if has_own_data(config) else _task_data(config, held_out_only=held_out_only)
    return replace(
        data,
        pair_transform=_own_component("pair_transform", config) or data.pair_transform,
        collate_fn=_own_component("collate_fn", config) or data.collate_fn,
    )


def _task_data(config: RunConfig, *, held_out_only: bool) -> RunData:
    pretrained = bool(config.model.pretrained)
    if pretrained:
        from unisono.tasks.pretrained import check_folder

        check_folder(config.model.pretrained, config.task.kind, source_copies(config))  # before a corpus is prepared
    tokenizer, task = find_tokenizer(config), config.task
    if pretrained and tokenizer is not None and tokenizer.name == BYTES:
        what = "%s has no tokenizer: a token is a byte of the text; data.tokenizer=FILE has another one"
        logging.getLogger("unisono").warning(what, config.model.pretrained)
    prepared = None
    if task.kind in LANGUAGE_MODELS:
        assert tokenizer is not None
        prepared = None if config.data.train else prepare_corpus(replace(config.data, tokenizer=tokenizer_spec(config)))
        data = language_data(
            task,
            config.data,
            tokens=(prepared.train, prepared.eval) if prepared else None,
            tokenizer=tokenizer,
            places_targets=pretrained,
            mask=tokenizer.mask,
            vocab_size=_token_ids(config, tokenizer),
            held_out_only=held_out_only,
        )
    else:
        data = predictor_data(
            task,
            config.data,
            config.image,
            config.text,
            tokenizer=tokenizer,
            buckets=config.model.vocab_size or DEFAULT_BUCKETS,
            held_out_only=held_out_only,
        )
    return RunData(
        train=data.train,
        held_out=data.held_out,
        prepared=prepared,
        tokenizer=tokenizer,
        transform=data.transform,
        pair_transform=data.pair_transform,
        collate_fn=data.collate_fn,
        held_out_rows=data.held_out_rows,
    )


def data_notices(config: RunConfig, data: RunData, *, found: bool) -> Iterator[dict[str, str]]:
    """Notices about the data at a run's start; ``found`` tells whether the task was completed from the training data."""
    if has_own_data(config):
        return
    if found:
        yield from found_notices(config.task, data.train)
    if data.tokenizer is not None and data.prepared is None:
        cut = None
        with suppress(DataError):  # a sample that cannot be read: the loader reports it, or replaces it
            cut = cut_notice(config.task, data.train, data.tokenizer, config.data.seq_len)
        if cut is not None:
            yield cut


def _own_data(config: RunConfig) -> RunData:
    result: Any = _find_component("data", config, {AUTO: None, TOKENS: None})(config)
    pair = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
    if len(pair) != 2 or not all(isinstance(data, Dataset | Sized) for data in pair):
        kinds = ", ".join(type(data).__name__ for data in pair)
        raise ConfigError(
            given=f"components.data returned {f'({kinds})' if pair else type(result).__name__}",
            rule="it returns a pair (training data, held-out data), each a Dataset or indexable with a length",
            consequence="there is nothing to train on",
            nearest="return train, held_out",
        )
    transform = _own_component("transform", config)
    return RunData(train=as_dataset(pair[0]), held_out=as_dataset(pair[1]), transform=transform)


def find_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of the configuration's text; None for other tasks and the user's own data. Reads no corpus."""
    if has_own_data(config) or config.task.kind not in TEXT_TASKS:
        return None
    spec = tokenizer_spec(config)
    if spec == BYTES and config.model.pretrained:
        refuse_other_tokenizer(config.model.pretrained)
    return load_tokenizer(spec)


def tokenizer_spec(config: RunConfig) -> str:
    """``data.tokenizer``; if that is the default and ``model.pretrained`` has a tokenizer, that folder; local copies of URLs."""
    pretrained = local_path(config.model.pretrained, source_copies(config))
    if config.data.tokenizer == BYTES and pretrained and os.path.isfile(tokenizer_file(pretrained)):
        return pretrained
    return local_path(config.data.tokenizer, source_copies(config))


def source_copies(config: RunConfig) -> Path:
    """Folder for the copies of folders and files at addresses."""
    return cache_folder(config.data) / "sources"


def build_model(config: RunConfig, tokenizer: Tokenizer | None) -> nn.Module:
    """The model of the configuration on the CPU; ``components.init``, ``run.seed`` and ``model.weights`` decide its values.

    Layers that the section ``quantize`` stores are zeros. ``tokenizer`` gives the size of the vocabulary; None for other tasks
    and the user's own data. Raises ConfigError, DataError, or CheckpointError for ``model.weights`` of another model.
    """
    cast(Any, torch).manual_seed(config.run.seed)
    model = initialize(_built_model(config, tokenizer), config.components.init, seed=config.run.seed)
    if config.model.weights:
        load_weights(model, config.model.weights, new_head=config.task.kind not in LANGUAGE_MODELS)
    if config.quantize.scheme != "none":
        put = make_aware if config.quantize.aware else make_stored
        put(model, config.quantize, convolutions=has_quantized_convolutions(config))
    return model


def has_quantized_convolutions(config: RunConfig) -> bool:
    """Whether ``quantize`` is about convolutions too; of a model of transformers only linear layers load from its files."""
    return not config.model.pretrained


def _built_model(config: RunConfig, tokenizer: Tokenizer | None) -> nn.Module:
    """The model with the values that its own code gave it."""
    if config.model.pretrained:
        from unisono.tasks.pretrained import load_pretrained

        padding = tokenizer.padding if tokenizer else None
        folder = config.model.pretrained
        return load_pretrained(folder, config.task, config.lora, padding=padding, cache=source_copies(config))
    name = config.components.model
    if name == AUTO:
        name = default_model(config.task.kind)
    if isinstance(name, str) and name in MODELS:
        return build_named(
            name,
            config.model,
            config.task,
            config.image,
            seq_len=config.data.seq_len,
            vocab_size=vocab_size(config, tokenizer),
        )
    return own_model(config)


def own_model(config: RunConfig) -> nn.Module:
    """The model that the user's ``components.model`` returns. Raises ConfigError."""
    model: Any = _find_component("model", config, dict.fromkeys((AUTO, *MODELS)))(config)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            given=f"components.model returned {type(model).__name__}",
            rule="it returns a torch.nn.Module",
            consequence="there is nothing to train",
            nearest="return the module itself, not its class or its weights",
        )
    return model


def vocab_size(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    """Rows of the model's table of tokens or categories. Raises DataError when it is too small for the tokenizer."""
    given = config.model.vocab_size
    if tokenizer is None:
        if not given and config.task.kind in TEXT_TASKS:
            raise DataError(
                given="model.vocab_size 0 with data of your own",
                rule="0 means the tokenizer's size, and there is no tokenizer",
                consequence="the embedding has no size",
                nearest="set model.vocab_size to one more than the largest token",
            )
        return given or DEFAULT_BUCKETS
    needed = _token_ids(config, tokenizer)
    if given:
        check_vocab(given, needed)
    return given or -(-needed // 64) * 64


def _token_ids(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Number of token ids, with that which hides tokens from a masked language model."""
    masked = config.task.kind == "masked_language_model"
    return max(tokenizer.vocab_size, tokenizer.mask + 1) if masked else tokenizer.vocab_size


def export_facts(config: RunConfig) -> dict[str, Any]:
    """What the inputs and outputs of the run's model mean, as JSON types; empty for language models and the user's own data."""
    task = config.task
    if has_own_data(config) or task.kind in LANGUAGE_MODELS:
        return {}
    facts: dict[str, Any] = {"kind": task.kind, "inputs": list(task.inputs), "target": task.target}
    if task.has_classes:
        facts["classes"] = list(task.classes)
    else:
        facts |= {"target_mean": task.target_mean, "target_std": task.target_std}
    if task.kind == "image":
        augment = image_augment(config.image, training=False)
        facts["image"] = {
            "size": config.image.size,
            "color": config.image.color,
            "center_frac": config.image.center_frac,
            "mean": list(augment.mean or ()),
            "std": list(augment.std or ()),
        }
    if task.kind == "table":
        facts["numbers"] = {
            name: {"mean": mean, "std": std}
            for name, mean, std in zip(number_columns(task), task.input_mean, task.input_std, strict=True)
        }
        facts["categories"] = {"columns": list(task.categories), "buckets": vocab_size(config, None)}
    return facts


def build_trainer(
    config: RunConfig,
    data: RunData,
    plan: Plan,
    *,
    world: World,
    events: EventLog,
    provenance: Mapping[str, Any],
    builds_early: bool = True,
) -> Trainer:
    """The trainer of this configuration and of the plan resolved from it.

    Nothing is started before it is entered, and a model that the plan shards is built then.

    Args:
        config: Configuration of the run.
        data: Training and held-out data; see ``build_data``.
        plan: Plan of the job, resolved from ``config.plan``.
        world: Ranks of the job; the caller closes it.
        events: Event log of this rank; the caller closes it.
        provenance: Facts, as JSON types by name, for the ``run_start`` event and every checkpoint.
        builds_early: Whether a model that no rank shards is built now, with its values.

    Raises:
        ConfigError: A component is unknown, cannot be imported or returns the wrong kind of object; see also ``checked_model``.
        DataError: ``model.vocab_size`` is too small for the tokenizer, or is 0 without one.
    """
    check_quantize(config, plan)
    build = partial(build_model, config, data.tokenizer)
    # pretrained values are read when the model is built: it cannot be built without them and filled later
    deferred = (plan.is_model_sharded or not builds_early) and not config.model.pretrained
    own_optimizer = _own_component("optimizer", config)
    return Trainer(
        build if deferred else checked_model(build(), config, data),
        data.train,
        plan,
        objective=find_objective(config),
        optimizer=own_optimizer or config.optim,
        schedule=_own_component("schedule", config) or config.schedule,
        clip_norm=config.optim.clip_norm if own_optimizer else None,
        distill=_distillation(config, data, world),
        options=config.train,
        checkpoint=config.checkpoint,
        run_dir=Path(config.run.dir),
        seed=config.run.seed,
        resume=config.run.resume,
        eval_data=data.held_out,
        metrics=build_metrics(config, data),
        callbacks=_callbacks(config),
        transform=_chained(data.transform, config),
        pair_transform=data.pair_transform,
        batch_transform=_own_component("batch_transform", config),
        collate_fn=data.collate_fn,
        loader=config.loader,
        observe=config.observe,
        flops_per_token=lambda model: gpt_flops_per_token(model, config.data.seq_len) if isinstance(model, GPT) else 0,
        world=world,
        events=events,
        provenance={**provenance, "settings": compared_settings(config, function_name)},
    )


def _distillation(config: RunConfig, data: RunData, world: World) -> Distillation | None:
    """The teacher, if there is one: what loads it when the run is started, and its options."""
    if not config.distill.teacher:
        return None
    from unisono.train.teacher import load_teacher  # which builds models of other configurations

    return Distillation(partial(load_teacher, config, data.tokenizer, world), replace(config.distill, teacher=""))


def check_quantize(config: RunConfig, plan: Plan) -> None:
    """Raise ConfigError for layers that cannot be trained, or that no rank has whole when it rounds them."""
    options = config.quantize
    if options.scheme == "none":
        return
    if not options.aware:
        raise ConfigError(
            given=f"quantize.scheme {options.scheme!r} without quantize.aware",
            rule="stored integers have no gradient: such a model is evaluated and exported",
            consequence="it cannot learn; nothing was started",
            nearest="quantize.aware=true, which trains the weights behind the rounded ones, and unisono quantize after it",
        )
    if plan.mesh.tp > 1 or plan.mesh.ep > 1:
        axis = "tp" if plan.mesh.tp > 1 else "ep"
        raise ConfigError(
            given=f"quantize.aware with plan.{axis} {getattr(plan.mesh, axis)}",
            rule="a scale is that of a whole row of a weight, and a rank with a part of the layer does not have it",
            consequence="the rounding would be another one than that of the quantized model; nothing was started",
            nearest=f"plan.{axis}=1; plan.dp_shard and plan.pp divide the model too",
        )


def gpt_flops_per_token(model: GPT, seq_len: int) -> int:
    """FLOPs of forward and backward per token; a tied table is the head's matrix too, and experts count that a token goes to."""
    options = model.options
    tied = options.vocab_size * options.dim if options.tied else 0
    return transformer_flops_per_token(
        matmul_params=matmul_params(model) - inactive_parameters(model) + tied,
        layers=options.num_layers,
        attention_dim=options.num_heads * options.head_width,
        seq_len=seq_len,
    )


def _chained(transform: Transform | None, config: RunConfig) -> Transform | None:
    """The task's transform, after the user's own if there is one, which sees the samples as they are read."""
    if not config.components.transform or has_own_data(config):
        return transform
    own: Transform = _find_component("transform", config, {})
    return own if transform is None else ChainedTransform(first=own, second=transform)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainedTransform:
    """Two transforms of a sample, one after the other, with the same generator."""

    first: Transform
    second: Transform

    def __call__(self, sample: Batch, rng: np.random.Generator) -> Batch:
        return self.second(self.first(sample, rng), rng)


def find_objective(config: RunConfig) -> Objective:
    """The objective of ``components.objective``; auto is that of the task."""
    if config.components.objective != AUTO:
        return _find_component("objective", config, OBJECTIVES)
    task = config.task
    if task.kind == "language_model":
        return OBJECTIVES["next_token"]
    if task.kind == "masked_language_model":
        return OBJECTIVES["masked_token"]
    return OBJECTIVES["mean_squared_error" if task.has_numbers else "cross_entropy"]


def build_metrics(config: RunConfig, data: RunData) -> dict[str, Metric]:
    """Name → metric: built-in ones, entry points (``() -> Metric``), and those of ``components.own_metrics``."""
    metrics: dict[str, Metric] = {}
    _check_metric_classes(config)
    scale = config.task.target_std or 1.0
    for name in config.components.metrics or _default_metrics(config, data):
        metrics[name] = find_metric(name, scale=scale) or _resolve("metrics", "components.metrics", name, METRICS)()
    if config.components.own_metrics:
        metrics |= _find_component("own_metrics", config, {})(config)
    return metrics


def _callbacks(config: RunConfig) -> Sequence[Every]:
    """What ``components.callbacks`` returns. Raises ConfigError for anything but observers."""
    if not config.components.callbacks:
        return ()
    given: Any = _find_component("callbacks", config, {})(config)
    if isinstance(given, list | tuple) and all(isinstance(item, Every) for item in cast("list[Any]", given)):
        return cast("list[Every]", given)
    kinds = [type(item).__name__ for item in cast("list[Any]", given)] if isinstance(given, list | tuple) else []
    shown = f"[{', '.join(kinds)}]" if kinds else type(given).__name__
    raise ConfigError(
        given=f"components.callbacks returned {shown}",
        rule="it returns a list of Every",
        consequence="nothing would be called",
        nearest="return [Every(steps=100, call=function)], from unisono.train import Every",
    )


def _check_metric_classes(config: RunConfig) -> None:
    """Raise ConfigError for a metric of fewer classes than the task has."""
    classes = len(config.task.classes) if config.components.objective == AUTO and not has_own_data(config) else 0
    few = [name for name in config.components.metrics if 0 < metric_classes(name) < classes]
    if config.task.has_classes and few:
        kind = few[0].partition(":")[0]
        raise ConfigError(
            given=f"components.metrics {few[0]!r} with {classes} classes",
            rule=f"{few[0]} counts {metric_classes(few[0])} classes, and each class of the task is one of them",
            consequence="the metric would have no value, and nothing was started",
            nearest=f"{kind}:{classes}" if kind != "auc" else f"accuracy or f1:{classes}",
        )


def _default_metrics(config: RunConfig, data: RunData) -> tuple[str, ...]:
    task = config.task
    if has_own_data(config):
        return ()
    if task.kind in LANGUAGE_MODELS:
        has_bytes = isinstance(data.held_out, TokenWindows) and data.held_out.has_target_bytes
        return ("bits_per_byte", "accuracy") if has_bytes else ("perplexity", "accuracy")
    if task.has_numbers:
        return ("mae", "rmse", "r2")
    classes = len(task.classes)
    return ("accuracy", f"f1:{classes}") if classes <= MAX_F1_CLASSES else ("accuracy", "top5")


# components.<field> -> the group of entry points that may stand there
_GROUPS = {
    "model": "models",
    "objective": "objectives",
    "data": "datasets",
    "transform": "transforms",
    "pair_transform": "transforms",
    "batch_transform": "transforms",
    "collate_fn": "collate_fns",
    "optimizer": "optimizers",
    "schedule": "schedules",
    "own_metrics": "metrics",
    "callbacks": "callbacks",
}


def _own_component(name: str, config: RunConfig) -> Any:
    """The entry point or code that ``components.<name>`` gives; None where it is empty."""
    return _find_component(name, config, {}) if getattr(config.components, name) else None


def _find_component(name: str, config: RunConfig, built_in: Mapping[str, Any]) -> Any:
    return _resolve(_GROUPS[name], f"components.{name}", getattr(config.components, name), built_in)


def _resolve(group: str, key: str, part: Any, built_in: Mapping[str, Any]) -> Any:
    """A callable as it is, a built-in by name, or the entry point of that name in ``unisono.<group>``."""
    if not isinstance(part, str):
        return part
    if part in built_in:
        return built_in[part]
    plugins = {entry.name: entry for entry in entry_points(group=f"unisono.{group}")}
    if part in plugins:
        return _load(plugins[part], key)
    names = [*built_in, *plugins]
    raise ConfigError(
        given=f"{key} = {part!r}",
        rule=f"it is built in ({', '.join(sorted(built_in)) or 'nothing is'}), an installed entry point of the group "
        f"'unisono.{group}' ({', '.join(sorted(plugins)) or 'none here'}), or a callable of a Python file",
        consequence="the run lacks this component, and nothing was started",
        nearest=(f"{nearest_name(part, names)}; or " if names else "")
        + "code of your own, in a Python file as unisono init --python writes one",
    )


def _load(plugin: EntryPoint, key: str) -> Any:
    try:
        return plugin.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            given=f"{key} = {plugin.name!r}, entry point {plugin.value!r} of "
            f"{plugin.dist.name if plugin.dist else 'an unnamed package'}: {type(error).__name__}: {error}",
            rule="an entry point names something that can be imported",
            consequence="the run lacks this component, and nothing was started",
            nearest="repair or reinstall that package",
        ) from error
