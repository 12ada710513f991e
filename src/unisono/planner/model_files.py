"""Models by name or as files: presets, folders of Hugging Face, configurations of runs, code. Imports torch to trace a model."""

from __future__ import annotations

import os
import shlex
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from unisono.config import load_config
from unisono.errors import ConfigError, UnisonoError
from unisono.planner.hugging_face_shape import CONFIG_FILE, bert_shape, hugging_face_shape
from unisono.planner.model_presets import PRESETS
from unisono.planner.model_shape import ModelShape
from unisono.sanitize import quoted
from unisono.storage.files import MAX_SHOWN_PATH, look_up
from unisono.storage.run_folder import RUN_FILE
from unisono.tasks.model_names import DEFAULT_EXPERTS, MODELS, default_model
from unisono.tasks.options import LANGUAGE_MODELS
from unisono.train.config import AUTO, RunConfig

_SUFFIXES: Final = (".json", ".toml", ".py")
DEFAULT_TOKENS: Final = 2048  # of a sequence of a model whose code does not say it
SHAPED: Final = ("gpt", "moe", "bert")  # built-in models that a shape is of


def is_model_file(name: str) -> bool:
    """Whether ``name`` is that of a file or folder, and not of a model. The name of a preset is never that of a folder."""
    if name.lower().endswith(_SUFFIXES) or ".py:" in name or name.startswith((".", "/", "~")):
        return True
    return name.lower() not in PRESETS and os.path.isdir(name)


def read_model(name: str, *, seq_len: int = 0, trust_python: bool = False) -> ModelShape:
    """The shape of the model of a file or folder.

    ``name`` is a ``config.json`` of Hugging Face, the configuration of a run (TOML or Python), a folder with one of them, or
    ``FILE.py:NAME``. Code of one's own is run, and its model traced.

    Args:
        name: The file or folder.
        seq_len: Tokens of a sequence that a model of one's own is traced with; 0: as configured, or ``DEFAULT_TOKENS``.
        trust_python: Whether a Python file that a run's folder names is run that was not run before (``config.trust``).

    Raises:
        ConfigError: It cannot be read, or describes no model that a shape can be of.
    """
    if ".py:" in name:
        return _shape_of_code(name, seq_len or DEFAULT_TOKENS)
    path, fault = look_up(name)
    given = f"model {quoted(name, MAX_SHOWN_PATH)}"
    if not fault and path.is_dir():
        found = [path / file for file in (CONFIG_FILE, RUN_FILE) if os.path.exists(path / file)]
        if not found:
            raise _refused(
                f"{given}, a folder without {CONFIG_FILE} or {RUN_FILE}",
                f"a folder of Hugging Face has {CONFIG_FILE}, and that of a run {RUN_FILE}",
                "the folder that save_pretrained wrote, or the folder of a run",
            )
        path = found[0]
    if fault or not path.exists():
        raise _refused(
            f"{given}: {fault or 'there is no such file'}",
            "a model is a preset, a file or a folder that can be read",
            "llama-3-8b, or a path that exists",
        )
    if path.suffix.lower() == ".json":
        return hugging_face_shape(path)
    return _configured_shape(path, seq_len, trust_python=trust_python)


def _shape_of_code(name: str, tokens: int) -> ModelShape:
    """The shape of ``FILE.py:NAME``: a module, or a class or function without arguments that makes it."""
    from torch import nn

    from unisono.config.python_file import read_objects
    from unisono.planner.traced_shape import traced_shape

    (code,) = read_objects(os.path.expanduser(name))
    return traced_shape(
        code.value if isinstance(code.value, nn.Module) else code.call, tokens=tokens, given=f"model {name}"
    )


def _configured_shape(path: Path, seq_len: int, *, trust_python: bool) -> ModelShape:
    """The shape of the model of a run's configuration, for sequences of ``data.seq_len`` tokens."""
    config = load_config(RunConfig, [path], trust_python=trust_python).value
    if config.model.pretrained:
        raise _refused(
            f"{path}: model.pretrained = {config.model.pretrained!r}",
            "the model is described by its own folder",
            f"the folder itself as model, or {_tracing(path)}",
        )
    kind, name = config.task.kind, config.components.model
    if name == AUTO:
        name = default_model(kind)
    installed = {each.name for each in entry_points(group="unisono.models")}
    if (not isinstance(name, str) or name in installed) and kind in LANGUAGE_MODELS and not config.model.pretrained:
        from unisono.planner.traced_shape import traced_shape
        from unisono.train.build import own_model

        tokens = seq_len or config.data.seq_len
        return traced_shape(lambda: own_model(config), tokens=tokens, given=f"{path}: components.model")
    if name not in SHAPED or kind not in LANGUAGE_MODELS or kind not in MODELS[str(name)]:
        raise _refused(
            f"{path}: components.model {name if isinstance(name, str) else 'of your own'!r} for task.kind {kind!r}",
            "a shape is that of a language model gpt or moe, or of a masked language model bert",
            _tracing(path),
        )
    return built_in_shape(config, str(name), _vocabulary(config, path))


def built_in_shape(config: RunConfig, name: str, vocab: int) -> ModelShape:
    """The shape of the built-in language model ``name`` as ``config`` has it, with ``vocab`` rows of the embedding."""
    model = config.model
    if name == "bert":
        return bert_shape(
            layers=model.num_layers,
            hidden=model.dim,
            heads=model.num_heads,
            ffn=model.ffn_dim or 4 * model.dim,
            vocab=vocab,
            positions=config.data.seq_len,
            segments=2,
        )
    experts = model.num_experts or (DEFAULT_EXPERTS if name == "moe" else 0)
    return ModelShape(
        layers=model.num_layers,
        hidden=model.dim,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_width,
        ffn=model.hidden_ffn,
        gated=True,
        vocab=vocab,
        tied=model.tied,
        experts=experts,
        experts_per_token=model.num_experts_per_token if experts else 0,
        other_params=(2 * model.num_layers + 1) * model.dim,  # norms
        max_seq_len=config.data.seq_len,
    )


def _vocabulary(config: RunConfig, path: Path) -> int:
    """Rows of the embedding: as configured, or by the tokenizer, which is then read."""
    if config.model.vocab_size:
        return config.model.vocab_size
    from unisono.train.build import find_tokenizer, vocab_size

    try:
        return vocab_size(config, find_tokenizer(config))
    except UnisonoError as error:
        given = "; ".join(problem.given for problem in error.problems)
        raise _refused(
            f"{path}: model.vocab_size 0, and no tokenizer to take it from: {given}",
            "the size of the vocabulary is that of the tokenizer unless it is set",
            "model.vocab_size in the file",
        ) from error


def _tracing(path: Path) -> str:
    file = shlex.quote(str(path))
    return f"unisono plan auto {file} or unisono plan fit {file}, which trace the model on this machine"


def _refused(given: str, rule: str, nearest: str) -> ConfigError:
    return ConfigError(given=given, rule=rule, consequence="nothing was predicted", nearest=nearest)
