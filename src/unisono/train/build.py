"""Builds a trainer from a configuration: a component is built in, an installed entry point, or the user's own callable."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from unisono.data.dataset import Dataset, as_dataset
from unisono.data.tokens.packing import PackedWindows
from unisono.data.tokens.tokenized_cache import PreparedCorpus, prepare_corpus
from unisono.data.tokens.tokenizer import Tokenizer, check_vocab, load_tokenizer
from unisono.data.tokens.windows import TokenWindows
from unisono.dist import World
from unisono.errors import ConfigError, DataError, nearest_name
from unisono.measure.flops import matmul_params, transformer_flops_per_token
from unisono.models.gpt import GPT
from unisono.models.moe import inactive_parameters
from unisono.models.options import ModelOptions
from unisono.observe.events import EventLog
from unisono.plan.plan import Plan
from unisono.train.config import RunConfig
from unisono.train.metrics import METRICS, Metric, find_metric
from unisono.train.objectives import OBJECTIVES, Objective
from unisono.train.trainer import Trainer

TOKENS = "tokens"
TOKEN_METRICS = ("bits_per_byte", "accuracy")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The data sets of a run, and for text the tokenized corpus."""

    train: Dataset
    held_out: Dataset
    prepared: PreparedCorpus | None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the corpus; None for the user's own data."""
        return self.prepared.tokenizer if self.prepared else None


def build_data(config: RunConfig) -> RunData:
    """The data sets that ``config.components.data`` names. Raises DataError or ConfigError."""
    if config.components.data == TOKENS:
        prepared = prepare_corpus(config.data)
        seq_len, boundaries = config.data.seq_len, config.data.boundaries
        # The held-out part is always read as a stream, so that runs of either packing are measured alike.
        if config.data.packing == "best_fit":
            train: Dataset = PackedWindows(prepared.train, seq_len=seq_len, boundaries=boundaries, name="train")
        else:
            stride = 1 if config.data.packing == "sliding" else seq_len
            train = TokenWindows(prepared.train, seq_len=seq_len, stride=stride, boundaries=boundaries, name="train")
        return RunData(
            train=train,
            held_out=TokenWindows(
                prepared.eval, seq_len=seq_len, boundaries=boundaries, target_bytes=True, name="held-out"
            ),
            prepared=prepared,
        )
    result: Any = _find_component("data", config, {TOKENS: None})(config)
    pair = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else ()
    if len(pair) != 2 or not all(isinstance(data, Dataset | Sized) for data in pair):
        kinds = ", ".join(type(data).__name__ for data in pair)
        raise ConfigError(
            given=f"components.data returned {f'({kinds})' if pair else type(result).__name__}",
            rule="it returns a pair (training data, held-out data), each a Dataset or indexable with a length",
            consequence="there is nothing to train on",
            nearest="return train, held_out",
        )
    return RunData(train=as_dataset(pair[0]), held_out=as_dataset(pair[1]), prepared=None)


def find_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of the configuration's text; None for the user's own data. Reads no corpus."""
    return load_tokenizer(config.data.tokenizer) if config.components.data == TOKENS else None


def build_model(config: RunConfig, tokenizer: Tokenizer | None) -> nn.Module:
    """The model that ``config.components.model`` names, initialised from ``run.seed`` alone, on the CPU.

    ``tokenizer`` gives the size of the vocabulary; None for the user's own data. Raises ConfigError or DataError.
    """
    cast(Any, torch).manual_seed(config.run.seed)
    if config.components.model == "gpt":
        return GPT(model_options(config, tokenizer))
    model: Any = _find_component("model", config, {"gpt": None})(config)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            given=f"components.model returned {type(model).__name__}",
            rule="it returns a torch.nn.Module",
            consequence="there is nothing to train",
            nearest="return the module itself, not its class or its weights",
        )
    return model


def model_options(config: RunConfig, tokenizer: Tokenizer | None) -> ModelOptions:
    """``config.model`` with the vocabulary resolved. Raises DataError when it is too small for the tokenizer."""
    if tokenizer is None:
        if not config.model.vocab_size:
            raise DataError(
                given="model.vocab_size 0 with data of your own",
                rule="0 means the tokenizer's size, and there is no tokenizer",
                consequence="the embedding has no size",
                nearest="set model.vocab_size to one more than the largest token",
            )
        return config.model
    if config.model.vocab_size:
        check_vocab(config.model.vocab_size, tokenizer.vocab_size)
        return config.model
    return replace(config.model, vocab_size=-(-tokenizer.vocab_size // 64) * 64)


def build_trainer(
    config: RunConfig,
    data: RunData,
    plan: Plan,
    *,
    world: World,
    events: EventLog,
    provenance: Mapping[str, Any],
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

    Raises:
        ConfigError: A component is unknown, cannot be imported or returns the wrong kind of object.
        DataError: ``model.vocab_size`` is too small for the tokenizer, or is 0 without one.
    """
    build = partial(build_model, config, data.tokenizer)
    return Trainer(
        build if plan.is_model_sharded else build(),
        data.train,
        plan,
        objective=find_objective(config),
        optimizer=config.optim,
        schedule=config.schedule,
        options=config.train,
        checkpoint=config.checkpoint,
        run_dir=Path(config.run.dir),
        seed=config.run.seed,
        resume=config.run.resume,
        eval_data=data.held_out,
        metrics=build_metrics(config),
        transform=_find_component("transform", config, {}) if config.components.transform else None,
        loader=config.loader,
        flops_per_token=lambda model: gpt_flops_per_token(model, config.data.seq_len) if isinstance(model, GPT) else 0,
        world=world,
        events=events,
        provenance=provenance,
    )


def gpt_flops_per_token(model: GPT, seq_len: int) -> int:
    """FLOPs of forward and backward per token; a tied table is the head's matrix too, and experts count that a token goes to."""
    options = model.options
    tied = options.vocab_size * options.dim if options.tied else 0
    return transformer_flops_per_token(
        matmul_params=matmul_params(model) - inactive_parameters(model) + tied,
        layers=options.num_layers,
        attention_dim=options.dim,
        seq_len=seq_len,
    )


def find_objective(config: RunConfig) -> Objective:
    """The objective of ``components.objective``."""
    return _find_component("objective", config, OBJECTIVES)


def build_metrics(config: RunConfig) -> dict[str, Metric]:
    """Name → metric: built-in ones, entry points (``() -> Metric``), and those of ``components.own_metrics``."""
    metrics: dict[str, Metric] = {}
    for name in config.components.metrics or (TOKEN_METRICS if config.components.data == TOKENS else ()):
        metrics[name] = find_metric(name) or _resolve("metrics", "components.metrics", name, METRICS)()
    if config.components.own_metrics:
        metrics |= _find_component("own_metrics", config, {})(config)
    return metrics


# components.<field> -> the group of entry points that may stand there
_GROUPS = {
    "model": "models",
    "objective": "objectives",
    "data": "datasets",
    "transform": "transforms",
    "own_metrics": "metrics",
}


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
        nearest=nearest_name(part, names) if names else "give a callable in a Python configuration file",
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
