"""Models of a Hugging Face folder: its configuration and safetensors, by the package transformers; never code of the folder."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from unisono.data.sources.remote import local_path
from unisono.errors import ConfigError, UnisonoError, missing_extra
from unisono.tasks.options import LANGUAGE_MODELS, LoraOptions, TaskOptions
from unisono.tasks.pretrained_folder import SAVE, PretrainedFolder, read_folder, unusable

_CLASSES: Final = {
    "language_model": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "masked_language_model": ("AutoModelForMaskedLM", None),
    "image": ("AutoModelForImageClassification", None),
    "text": ("AutoModelForSequenceClassification", "SEQ_CLS"),
    "sequence_labelling": ("AutoModelForTokenClassification", "TOKEN_CLS"),
}

_MAX_MESSAGE: Final = 400  # characters of an error of transformers
_NEW_VALUES: Final = 10**7  # parameters of a new head that need no comparison with the files


def check_folder(folder: str, kind: str, cache: Path, *, setting: str = "model.pretrained") -> PretrainedFolder:
    """The folder, if it has a model that can be loaded without running its code. Imports no torch.

    Args:
        folder: Folder with ``config.json`` and safetensors, or its address.
        kind: ``task.kind``.
        cache: Folder for the copy of a folder at an address.
        setting: The setting that names the folder, for errors.

    Raises:
        ConfigError: The folder has no such model.
        DataError: The folder at an address cannot be copied.
    """
    if kind not in _CLASSES:
        raise unusable(
            f"{setting} with task.kind {kind!r}",
            f"models of transformers are for {', '.join(_CLASSES)}",
            f"components.model=mlp, and no {setting}",
        )
    return read_folder(local_path(folder, cache), setting=setting)


def load_pretrained(
    folder: str,
    task: TaskOptions,
    lora: LoraOptions,
    *,
    padding: int | None,
    cache: Path,
    may_have_new_head: bool = True,
    setting: str = "model.pretrained",
) -> nn.Module:
    """The model of a folder for a resolved task, with a new head where the folder's has other classes.

    Args:
        folder: Folder with ``config.json`` and safetensors, or its address.
        task: The task, with its classes.
        lora: Adapters, if any; the other weights are then frozen.
        padding: Token id of padding, for models that look for the end of a text by it; None for images.
        cache: Folder for the copy of a folder at an address.
        may_have_new_head: Whether the weights of a head may be missing, as for a model that is fine-tuned.
        setting: The setting that names the folder, for errors.

    Raises:
        DataError: The folder at an address does not exist or cannot be copied.
        ConfigError: The folder has no such model, or not all its weights, or a model for another task.
        ExtraError: transformers, or for adapters peft, is not installed.
    """
    contents = check_folder(folder, task.kind, cache, setting=setting)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise missing_extra("hf", "transformers", f"{setting} {folder!r}") from error
    class_name, peft_task = _CLASSES[task.kind]
    labels: dict[str, Any] = {}
    if task.kind not in LANGUAGE_MODELS:
        names = task.classes or tuple(f"value_{n}" for n in range(task.num_numbers))
        names = names if len(names) > 1 else task.classes or ("value",)
        labels = {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
        }
    with _quiet_and_offline(transformers), contents.checked_files() as files:
        _refuse_inflated(transformers, class_name, contents, files, labels)
        try:
            model, loading = getattr(transformers, class_name).from_pretrained(
                str(files),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype="float32",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # checked below, by name
                **labels,
            )
        except UnisonoError:  # a model built without its values
            raise
        except (
            Exception
        ) as error:  # the classes of transformers raise anything for a configuration that they do not expect
            said = " ".join(str(error).replace(str(files), folder).split())[:_MAX_MESSAGE]
            raise unusable(
                f"{setting} {folder!r} as {class_name}: {type(error).__name__}: {said}",
                f"transformers {transformers.__version__} loads the folder with that class",
                f"the config.json that was saved with the weights, of a model for task.kind {task.kind!r}",
            ) from error
    # the temporary folder is gone; adapters name the model's folder
    model.name_or_path = model.config._name_or_path = folder
    _check_loading(model, loading, contents, has_new_head=bool(labels), may_be_new=may_have_new_head)
    if padding is not None and getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = padding
    if lora.rank:
        model = _with_adapters(model, lora, peft_task)
    return cast(nn.Module, model)


def _check_loading(
    model: Any, loading: dict[str, Any], contents: PretrainedFolder, *, has_new_head: bool, may_be_new: bool
) -> None:
    """Refuse weights that would be random, but for a head; report tensors of the folder that are not used."""
    mismatched = {name: (list(there), list(here)) for name, there, here in loading["mismatched_keys"]}
    missing = set(loading["missing_keys"]) - mismatched.keys()
    unused: list[str] = sorted(loading["unexpected_keys"])
    wrong = [
        f"{name} is {there} in the files and {here} by config.json"
        for name, (there, here) in sorted(mismatched.items())
        if not (may_be_new and has_new_head and _is_head(model, name))
    ]
    wrong += [f"{name} is not in the files" for name in sorted(missing) if not (may_be_new and _is_head(model, name))]
    if wrong:
        more = f", and {len(wrong) - 1} more such weights" if len(wrong) > 1 else ""
        others = f"; not used are {len(unused)}, the first {unused[0]}" if unused else ""
        raise ConfigError(
            given=f"{contents.given} as {type(model).__name__}: {wrong[0]}{more}{others}",
            rule="the weights are those of the model in config.json"
            + ("; only the head of the task may be new" if may_be_new else ", those of its head too"),
            consequence="these weights would be random; nothing was started",
            nearest="the config.json that was saved with the weights, or " + SAVE,
        )
    log = logging.getLogger("unisono")
    if new := sorted(missing | mismatched.keys()):
        # a new head is what fine-tuning is about; a language model without its own is not
        level = logging.INFO if has_new_head else logging.WARNING
        log.log(level, "%s has no weights for %s: they are new", contents.given, ", ".join(new))
    if unused:
        log.warning(
            "%s has %d tensors that %s does not use, the first %s",
            contents.given,
            len(unused),
            type(model).__name__,
            unused[0],
        )


def _is_head(model: Any, name: str) -> bool:
    """Whether a tensor is outside the part that models of all tasks share, or in the pooler before a head."""
    prefix: str = model.base_model_prefix
    if prefix and hasattr(model, prefix):
        return not name.startswith(f"{prefix}.") or name.startswith(f"{prefix}.pooler.")
    return name.split(".")[0] in ("classifier", "score", "head", "lm_head", "cls")


def _refuse_inflated(
    transformers: Any, class_name: str, contents: PretrainedFolder, files: Path, labels: dict[str, Any]
) -> None:
    """Refuse a configuration of a model far larger than the weights, before it takes memory."""
    num_values = 0
    with (
        suppress(Exception),
        torch.random.fork_rng([]),
        torch.device("meta"),
    ):  # what fails here also fails with values, with an error of its own
        config = transformers.AutoConfig.from_pretrained(
            str(files), local_files_only=True, trust_remote_code=False, **labels
        )
        model = getattr(transformers, class_name).from_config(config, trust_remote_code=False)
        num_values = sum(parameter.numel() for parameter in model.parameters())
    if num_values > 2 * contents.num_values + _NEW_VALUES:
        raise ConfigError(
            given=f"{contents.given}, whose config.json is of a model with {num_values} parameters, "
            f"with files of {contents.num_values}",
            rule="the weights are those of the model in config.json; only the head of the task may be new",
            consequence="most weights would be random; nothing was started",
            nearest="the config.json that was saved with the weights, or " + SAVE,
        )


@contextmanager
def _quiet_and_offline(transformers: Any) -> Generator[None]:
    """Without progress bars and reports of transformers, which every rank would print, and without any request to a hub."""
    log, hub = transformers.utils.logging, importlib.import_module("huggingface_hub").constants
    level, bars, offline = log.get_verbosity(), log.is_progress_bar_enabled(), hub.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = True
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = offline
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _with_adapters(model: Any, lora: LoraOptions, peft_task: str | None) -> Any:
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise missing_extra("lora", "peft", f"lora.rank {lora.rank}") from error
    _check_rank(model, lora)
    # peft keeps the heads of its own tasks trainable; an image model's head is called classifier
    heads = None if peft_task is not None else [name for name, _ in model.named_children() if name == "classifier"]
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.modules) or None,
        task_type=peft_task,
        modules_to_save=heads or None,
    )
    linear = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)})
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(
            given=f"lora.modules {list(lora.modules)} for {type(model).__name__}: {str(error).splitlines()[0]}",
            rule="adapters are added to linear layers of these names",
            consequence="nothing was started",
            nearest=f"lora.modules with names of {', '.join(linear[:8])}",
        ) from error


def _check_rank(model: nn.Module, lora: LoraOptions) -> None:
    """Refuse a rank above that of every layer that may get adapters."""
    ranks = [
        min(len(weight), weight[0].numel())
        for name, part in model.named_modules()
        if not lora.modules or f".{name}".endswith(tuple(f".{module}" for module in lora.modules))
        if isinstance(weight := getattr(part, "weight", None), nn.Parameter) and weight.ndim > 1 and weight.numel()
    ]
    if ranks and lora.rank > max(ranks):
        raise ConfigError(
            given=f"lora.rank {lora.rank} for {type(model).__name__}, whose adapted layers have ranks of at most {max(ranks)}",
            rule="an adapter is a product of two matrices with a lower rank than the layer's",
            consequence="the adapters would be larger than the layers; nothing was started",
            nearest=f"lora.rank={min(8, max(ranks))}",
        )
