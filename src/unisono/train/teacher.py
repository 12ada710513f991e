"""The teacher that ``distill.teacher`` names: the newest checkpoint of a run, or a Hugging Face folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from torch import nn

from unisono.config import load_config
from unisono.config.fields import BASE
from unisono.config.toml_file import read_toml
from unisono.config.values import CALLABLE
from unisono.data.sources.remote import local_path
from unisono.data.tokens.tokenizer import Tokenizer, load_tokenizer, tokenizer_file
from unisono.dist import World
from unisono.errors import ConfigError
from unisono.storage.run_folder import RUN_FILE
from unisono.tasks.options import LANGUAGE_MODELS, LoraOptions
from unisono.train.build import find_tokenizer, has_own_data, source_copies, vocab_size
from unisono.train.config import RunConfig
from unisono.train.load import load_model

# what the inputs and outputs of a model mean, beside its tokenizer
_TASK_FIELDS: Final = (
    *("kind", "predicts", "inputs", "categories", "input_mean", "input_std", "classes", "target_mean", "target_std"),
)
_UNNAMED: Final = re.compile(r"LABEL_\d+")  # how transformers names classes without names
_MAX_SHOWN: Final = 80
_SETTING: Final = "distill.teacher"
_SAME_TASK: Final = (
    "a teacher that was trained on the same columns, classes and tokenizer, or those of the teacher here"
)


def load_teacher(config: RunConfig, tokenizer: Tokenizer | None, world: World) -> nn.Module:
    """The teacher of a configuration, whole, on the CPU. All ranks of ``world`` call it.

    Args:
        config: Configuration of the student's run, with its resolved task.
        tokenizer: Its tokenizer; None for other tasks and the user's own data.
        world: Ranks that agree on the newest checkpoint.

    Raises:
        ConfigError: The folder holds no model, or one of other classes, inputs or tokens.
        CheckpointError: The run has no good checkpoint.
    """
    given = config.distill.teacher
    folder = Path(os.path.expanduser(given))
    if not (folder / RUN_FILE).is_file():
        return _pretrained_teacher(config, tokenizer)
    if folder.resolve() == Path(config.run.dir).resolve():
        raise _refused(
            f"distill.teacher {given!r}, which is run.dir",
            "a teacher is another model, which has been trained",
            "another run.dir for the student",
        )
    teacher = _config_of_run(folder)
    own = find_tokenizer(teacher)
    _require_equal(given, [*_task_differences(config, teacher), *_tokenizer_differences(tokenizer, own)])
    model, _ = load_model(teacher, own, world, None)
    _require_equal_vocabulary(config, tokenizer, model)
    return model


def _config_of_run(folder: Path) -> RunConfig:
    """The configuration of a run whose model needs no code but this package's and installed packages'."""
    run_file = folder / RUN_FILE
    document = read_toml(run_file).values
    components: Any = document.get("components", {})
    code = [label for label in components.values() if isinstance(label, str) and label.startswith(CALLABLE)]
    if BASE in document or code:
        raise _refused(
            f"distill.teacher {str(folder)!r}, a run with code of its own",
            "its folder names that code, which is not run for another run",
            f"{folder / 'export'}, if it is of a model of transformers; in Python Trainer(…, distill=Distillation(teacher))",
        )
    return load_config(RunConfig, [run_file], overrides=[f"run.dir={json.dumps(str(folder))}"]).value


def _pretrained_teacher(config: RunConfig, tokenizer: Tokenizer | None) -> nn.Module:
    from unisono.tasks.pretrained import check_folder, load_pretrained

    given, task = config.distill.teacher, config.task
    cache = source_copies(config)
    contents = check_folder(given, task.kind, cache, setting=_SETTING)
    if task.has_classes:
        names = [
            str(name) for _, name in sorted(contents.config.get("id2label", {}).items(), key=lambda item: int(item[0]))
        ]
        unnamed = all(map(_UNNAMED.fullmatch, names)) and len(names) in (0, len(task.classes))
        if not unnamed:
            _require_equal(given, _differences("classes", task.classes, tuple(names)))
    file = tokenizer_file(local_path(given, cache))
    own = load_tokenizer(str(file)) if tokenizer is not None and os.path.isfile(file) else None
    _require_equal(given, _tokenizer_differences(tokenizer, own))
    padding = tokenizer.padding if tokenizer else None
    model = load_pretrained(
        given, task, LoraOptions(), padding=padding, cache=cache, may_have_new_head=False, setting=_SETTING
    )
    _require_equal_vocabulary(config, tokenizer, model)
    return model


def _task_differences(config: RunConfig, teacher: RunConfig) -> Iterator[str]:
    student = config.task
    for name in _TASK_FIELDS:
        yield from _differences(f"task.{name}", getattr(student, name), getattr(teacher.task, name))
    if student.kind == "image":
        yield from _differences("image.color", config.image.color, teacher.image.color)


def _tokenizer_differences(student: Tokenizer | None, teacher: Tokenizer | None) -> Iterator[str]:
    if student is not None and teacher is not None and student.fingerprint != teacher.fingerprint:
        yield (
            f"the tokenizer {student.name!r} with {student.vocab_size} tokens here, {teacher.name!r} with "
            f"{teacher.vocab_size} there"
        )


def _require_equal_vocabulary(config: RunConfig, tokenizer: Tokenizer | None, teacher: nn.Module) -> None:
    """Raise ConfigError for tables of tokens or categories with other rows, where both are known and must be equal."""
    if config.model.pretrained or has_own_data(config) or config.task.kind not in (*LANGUAGE_MODELS, "table"):
        return
    sizes: Any = getattr(teacher, "options", None) or getattr(teacher, "config", None)
    teacher_size = getattr(sizes, "vocab_size", None)
    if isinstance(config.components.model, str) and teacher_size is not None:
        differences = _differences("model.vocab_size", vocab_size(config, tokenizer), teacher_size)
        _require_equal(config.distill.teacher, differences, nearest=f"model.vocab_size={teacher_size}")


def _differences(name: str, student: Any, teacher: Any) -> Iterator[str]:
    if student != teacher:
        yield f"{name} {_shown(student)} here, {_shown(teacher)} there"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def _require_equal(given: str, differences: Iterable[str], *, nearest: str = _SAME_TASK) -> None:
    """Raise ConfigError for a teacher that sees or says something else than the student."""
    if found := list(differences):
        raise _refused(
            f"distill.teacher {given!r} with other inputs or outputs than this run: {'; '.join(found)}",
            "teacher and student see the same inputs, and have an output for each of the same classes or tokens",
            nearest,
        )


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was started", nearest=nearest)
