"""Models of a Hugging Face folder: its configuration and safetensors, by the package transformers; never code of the folder."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from torch import nn

from unisono.data.sources.remote import local_path
from unisono.errors import ConfigError, missing_extra
from unisono.tasks.options import LoraOptions, TaskOptions

_CLASSES: Final = {
    "language_model": ("AutoModelForCausalLM", "CAUSAL_LM"),
    "masked_language_model": ("AutoModelForMaskedLM", None),
    "image": ("AutoModelForImageClassification", None),
    "text": ("AutoModelForSequenceClassification", "SEQ_CLS"),
    "sequence_labelling": ("AutoModelForTokenClassification", "TOKEN_CLS"),
}


def check_folder(folder: str, kind: str, cache: Path) -> Path:
    """The local folder, if it has a model that can be loaded without running its code. Raises ConfigError or DataError."""
    path = Path(local_path(folder, cache)).expanduser()
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise _unusable(f"model.pretrained {folder!r}: {type(error).__name__}: {error}", _FOLDER, _SAVE) from error
    if kind not in _CLASSES:
        raise _unusable(
            f"model.pretrained with task.kind {kind!r}",
            f"models of transformers are for {', '.join(_CLASSES)}",
            "components.model=mlp, and no model.pretrained",
        )
    if "auto_map" in config:
        raise _unusable(
            f"model.pretrained {folder!r}, whose config.json names code in the folder (auto_map)",
            "code of a model's folder is never run",
            "a model whose class is part of transformers, or a class of your own as components.model in a Python file",
        )
    if not any(path.glob("*.safetensors")):
        others = sorted(file.name for file in path.glob("*.bin"))
        raise _unusable(
            f"model.pretrained {folder!r} without *.safetensors" + (f", with {others[0]}" if others else ""),
            _FOLDER + "; files of pickle can run code and are not read",
            _SAVE,
        )
    return path


def load_pretrained(
    folder: str, task: TaskOptions, lora: LoraOptions, *, padding: int | None, cache: Path
) -> nn.Module:
    """The model of a folder for a resolved task, with a new head where the folder's has other classes.

    Args:
        folder: Folder with ``config.json`` and safetensors, or its address.
        task: The task, with its classes.
        lora: Adapters, if any; the other weights are then frozen.
        padding: Token id of padding, for models that look for the end of a text by it; None for images.
        cache: Folder for the copy of a folder at an address.

    Raises:
        DataError: The folder at an address does not exist or cannot be copied.
        ConfigError: The folder has no such model, or a model for another task.
        ExtraError: transformers, or for adapters peft, is not installed.
    """
    path = check_folder(folder, task.kind, cache)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise missing_extra("hf", "transformers", f"model.pretrained {folder!r}") from error
    class_name, peft_task = _CLASSES[task.kind]
    settings: dict[str, Any] = {}
    if task.kind not in ("language_model", "masked_language_model"):
        names = task.classes or ("value",)
        settings = {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
            "ignore_mismatched_sizes": True,
        }
    try:
        with _quiet(transformers):
            model, loading = getattr(transformers, class_name).from_pretrained(
                str(path),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype="float32",
                output_loading_info=True,
                **settings,
            )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _unusable(
            f"model.pretrained {folder!r} as {class_name}: {first_line}",
            f"transformers {transformers.__version__} loads the folder with that class",
            "another task.kind, or the folder of a model for this one",
        ) from error
    new = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    if new:
        # a new head is what fine-tuning is about; a language model without its own weights is not
        level = logging.INFO if settings else logging.WARNING
        logging.getLogger("unisono").log(level, "%s has no weights for %s: they are new", folder, ", ".join(new))
    if padding is not None and getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = padding
    if lora.rank:
        model = _with_adapters(model, lora, peft_task)
    return cast(nn.Module, model)


@contextmanager
def _quiet(transformers: Any) -> Generator[None]:
    """Without progress bars and reports of transformers, which every rank would print."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def _with_adapters(model: Any, lora: LoraOptions, peft_task: str | None) -> Any:
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise missing_extra("lora", "peft", f"lora.rank {lora.rank}") from error
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


_FOLDER: Final = "the folder has config.json and the weights as *.safetensors"
_SAVE: Final = "model.save_pretrained(folder) of a model of transformers, or a run's export"


def _unusable(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was started", nearest=nearest)
