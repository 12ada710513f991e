"""The files of a Hugging Face folder that are read, and their checks: no code, and nothing elsewhere. Torch-free."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from safetensors import SafetensorError, safe_open

from unisono.errors import ConfigError
from unisono.sanitize import quoted, shorten
from unisono.storage.files import MAX_SHOWN_PATH, look_up, require_regular
from unisono.storage.limits import MAX_MODEL_CONFIG_BYTES, MAX_UNCOUNTED_LAYERS, read_json
from unisono.storage.scratch import scratch_folder

_CONFIG, _GENERATION, _ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

# files of tokenizers other than tokenizer.json, which alone is read
_TOKENIZER = "tokenizer.json"
_OTHER_TOKENIZERS: Final = (
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "tekken.json", "tokenizer_config.json"),
)

_CODE_FIELDS: Final = ("auto_map", "custom_pipelines")
# fields by which transformers reads other files, fetches something, or puts other classes in place of the model's
_OTHER_FIELDS: Final = (
    *("quantization_config", "compression_config", "transformers_weights", "distributed_config", "fusion_config"),
    *("kernel_config", "use_kernels", "use_pretrained_backbone"),
)
# any other name is a repository of kernels, or may be replaced by one where its package is not installed
_OWN_ATTENTION: Final = ("eager", "sdpa", "flex_attention")
_OWN_EXPERTS: Final = ("eager", "batched_mm", "grouped_mm")
_LAYER_COUNTS: Final = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")

FOLDER_RULE: Final = "the folder has config.json and the weights as *.safetensors"
SAVE: Final = "model.save_pretrained(folder) of a model of transformers, or a run's export"


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedFolder:
    """The checked contents of a folder.

    Attributes:
        given: The setting and the folder, for errors.
        config: ``config.json``.
        generation: ``generation_config.json``; None if there is none.
        weights: Files of weights by their names in the folder.
        weight_map: Name of a tensor → name of its file; empty for ``model.safetensors`` alone.
        num_values: Elements of all tensors of the files.
        tensor_names: Names of all tensors of the files, sorted.
    """

    given: str
    config: dict[str, Any]
    generation: dict[str, Any] | None
    weights: dict[str, Path]
    weight_map: dict[str, str]
    num_values: int
    tensor_names: tuple[str, ...]

    @contextmanager
    def checked_files(self) -> Generator[Path]:
        """A temporary folder with these files alone: the others of the folder can have no effect on what is loaded."""
        with scratch_folder("unisono-pretrained-") as folder:
            (folder / _CONFIG).write_text(json.dumps(self.config), encoding="utf-8")
            if self.generation is not None:
                (folder / _GENERATION).write_text(json.dumps(self.generation), encoding="utf-8")
            if self.weight_map:
                index: dict[str, Any] = {"metadata": {}, "weight_map": self.weight_map}
                (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
            for file_name, file in self.weights.items():
                (folder / file_name).symlink_to(file)
            yield folder


def read_folder(folder: str, *, setting: str = "model.pretrained") -> PretrainedFolder:
    """Read and check the files of a folder. Raises ConfigError, about ``setting``, which names it."""
    given = f"{setting} {folder!r}"
    path, fault = look_up(folder)
    if fault:
        raise unusable(f"{setting} {quoted(folder, MAX_SHOWN_PATH)}: {fault}", FOLDER_RULE, SAVE)
    _refuse_adapters(path, folder, given)
    config = _read_json(path, _CONFIG, given)
    _check_config(config, given)
    generation = _read_json(path, _GENERATION, given) if (path / _GENERATION).exists() else None
    weights, weight_map = _weights(path, given)
    shapes = {name: shape for file in weights.values() for name, shape in _shapes(file, given)}
    _check_layers(config, len(shapes), given)
    return PretrainedFolder(
        given=given,
        config=config,
        generation=generation,
        weights=weights,
        weight_map=weight_map,
        num_values=sum(map(math.prod, shapes.values())),
        tensor_names=tuple(sorted(shapes)),
    )


def refuse_other_tokenizer(folder: str) -> None:
    """Raise ConfigError for a folder whose tokenizer is not a ``tokenizer.json``, and would not be used."""
    path, _ = look_up(folder)
    found = next((name for name in _OTHER_TOKENIZERS if os.path.exists(path / name)), None)
    if found is not None and not os.path.isfile(path / _TOKENIZER):
        raise ConfigError(
            given=f"model.pretrained {folder!r} with {found} and without {_TOKENIZER}",
            rule=f"texts are encoded by {_TOKENIZER}, and as raw bytes where the folder has no tokenizer",
            consequence="the model would see other token ids than it learned; nothing was started",
            nearest=f"transformers.AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r}), which writes "
            f"{_TOKENIZER}, or data.tokenizer=FILE",
        )


def unusable(given: str, rule: str, nearest: str) -> ConfigError:
    """The error of a folder that cannot be loaded."""
    return ConfigError(given=given, rule=rule, consequence="nothing was started", nearest=nearest)


def _refuse_adapters(path: Path, folder: str, given: str) -> None:
    if not (path / _ADAPTER).exists():
        return
    base = _read_json(path, _ADAPTER, given).get("base_model_name_or_path")
    base = base if isinstance(base, str) and base else None
    beside = "beside a model" if (path / _CONFIG).exists() else "without the model itself"
    raise unusable(
        f"{given}, which has adapters of {base or 'some model'!r} ({_ADAPTER}) {beside}",
        "the folder has a whole model; adapters alone, as a run with lora.rank exports them, are not loaded",
        "to train them further, the run.dir that they are of with more train.steps; to start from them, a folder written by "
        f"PeftModel.from_pretrained(base, {folder!r}).merge_and_unload().save_pretrained(...); for new ones, "
        f"model.pretrained={base or 'BASE'} with lora.rank=8",
    )


def _read_json(path: Path, name: str, given: str) -> dict[str, Any]:
    file = path / name
    try:
        if file.is_file():
            _refuse_outside(path, name, given)
            if (size := file.stat().st_size) > MAX_MODEL_CONFIG_BYTES:
                raise ValueError(f"{name} has {size} bytes, at most {MAX_MODEL_CONFIG_BYTES} are read")
        elif file.exists():  # reading a pipe would wait
            raise OSError(f"{name} is not a file")
        decode = partial(json.loads, parse_constant=lambda text: _constant(name, text))
        content = read_json(file, decode, max_bytes=MAX_MODEL_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise unusable(f"{given}: {type(error).__name__}: {error}", FOLDER_RULE, SAVE) from error
    if not isinstance(content, dict):
        raise unusable(
            f"{given}, whose {name} is {json.dumps(content)[:40]}", f"{name} is a JSON object, as {{...}}", SAVE
        )
    return cast("dict[str, Any]", content)


def _constant(name: str, text: str) -> float:
    """Infinity, which configurations of transformers have; a NaN passes every check of a range."""
    if text == "NaN":
        raise ValueError(f"{name} has NaN")
    return float(text)


def _refuse_outside(path: Path, name: str, given: str) -> None:
    """Refuse a link to a file elsewhere; those of a snapshot in the hub's cache, to its blobs, are the folder's own."""
    home, real = path.resolve(), (path / name).resolve()
    if real.is_relative_to(home):
        return
    if home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs":
        return
    raise unusable(
        f"{given}, whose {name} is a link to {real}",
        "a folder has its files in it",
        f"a copy in place of the link: cp --remove-destination {real} {path / name}",
    )


def _fields(content: Any) -> Iterator[tuple[str, Any]]:
    """All fields of a configuration and of those in it, by name."""
    if isinstance(content, dict):
        for name, value in cast("dict[str, Any]", content).items():
            yield name, value
            yield from _fields(value)
    elif isinstance(content, list):
        for value in cast("list[Any]", content):
            yield from _fields(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in cast("dict[str, Any]", value).values():
            yield from _texts(inner)
    elif value is not None:
        yield str(value)


def _check_config(config: dict[str, Any], given: str) -> None:
    """Refuse fields by which transformers would run code, fetch something or read other files."""
    for name, value in _fields(config):
        if name in _CODE_FIELDS:
            raise unusable(
                f"{given}, whose config.json names code in the folder ({name})",
                "code of a model's folder is never run",
                "a model whose class is part of transformers, or a class of your own as components.model in a Python file",
            )
        if name in _OTHER_FIELDS and value:
            quantized = name in ("quantization_config", "compression_config")
            raise unusable(
                f"{given}, whose config.json has {name}",
                "weights are floating-point tensors of the folder's safetensors, and classes those of transformers",
                "the folder of the model before it was quantized, or model.dequantize().save_pretrained(folder)"
                if quantized
                else f"a config.json without {name}",
            )
        if name.endswith("_implementation") or name.endswith("_implementation_internal"):
            own = _OWN_EXPERTS if "experts" in name else _OWN_ATTENTION
            for text in _texts(value):
                if text not in own:
                    raise unusable(
                        f"{given}, whose config.json has {name} {text!r}",
                        "code is never fetched: a kernel of a hub can be named there; allowed are " + ", ".join(own),
                        f"a config.json without {name}: transformers then chooses one of its own",
                    )


def _check_layers(config: dict[str, Any], num_tensors: int, given: str) -> None:
    """Refuse more layers than there are tensors, which take memory and time also without values."""
    for name, value in _fields(config):
        if name in _LAYER_COUNTS and isinstance(value, int) and value > max(MAX_UNCOUNTED_LAYERS, num_tensors):
            raise unusable(
                f"{given}, whose config.json has {name} {value} for {num_tensors} tensors",
                "the weights of every layer are in the folder",
                "the config.json that was saved with the weights",
            )


def _weights(path: Path, given: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Files of weights by name, and the file of each tensor where an index names it."""
    if (path / _WEIGHTS).is_file():
        _refuse_outside(path, _WEIGHTS, given)
        return {_WEIGHTS: (path / _WEIGHTS).resolve()}, {}
    if not (path / _INDEX).is_file():
        named = sorted(file.name for file in path.glob("*.safetensors"))
        pickled = sorted(file.name for file in path.glob("*.bin"))
        if named:
            raise unusable(f"{given} with {named[0]}, and without {_WEIGHTS} or {_INDEX}", FOLDER_RULE, SAVE)
        raise unusable(
            f"{given} without *.safetensors" + (f", with {pickled[0]}" if pickled else ""),
            FOLDER_RULE + "; files of pickle can run code and are not read",
            SAVE,
        )
    weight_map: Any = _read_json(path, _INDEX, given).get("weight_map")
    names = cast("dict[str, Any]", weight_map) if isinstance(weight_map, dict) else {}
    if not names:
        raise unusable(
            f"{given}, whose {_INDEX} has weight_map {json.dumps(weight_map)[:40]}",
            "weight_map has the file of every tensor",
            SAVE,
        )
    for tensor, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise unusable(
                f"{given}, whose {_INDEX} has {name!r} for {tensor!r}",
                "weight_map has names of *.safetensors files in the folder, without a path",
                SAVE,
            )
        if not os.path.isfile(path / name):  # also for a name that no file system takes
            raise unusable(
                f"{given} without {shorten(name)}, which {_INDEX} names", FOLDER_RULE, "copy that file there, too"
            )
    for name in sorted(set(names.values())):
        _refuse_outside(path, name, given)
    return {name: (path / name).resolve() for name in sorted(set(names.values()))}, names


def _shapes(file: Path, given: str) -> Iterator[tuple[str, list[int]]]:
    try:
        require_regular(file)
        with safe_open(str(file), framework="numpy") as opened:
            names: list[str] = opened.keys()
            for name in names:
                yield name, opened.get_slice(name).get_shape()
    except (OSError, SafetensorError) as error:
        raise unusable(
            f"{given}, whose {file.name} cannot be read: {error}",
            FOLDER_RULE + "; a file that was cut or damaged is not loaded",
            "copy it again, or " + SAVE,
        ) from error
