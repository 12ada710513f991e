"""Shapes of traced models in one JSON file of the user's cache folder, by a digest of the model. Imports no torch.

    {"version": 1, "shapes": {"9f86d0…": {…}}}

The file may be deleted at any time. One that is damaged, of another version or that another user can have written is not read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from unisono.data.options import default_cache_dir
from unisono.planner.model_shape import ModelShape
from unisono.storage.directory import make_folder
from unisono.storage.files import file_lock, write_atomically
from unisono.storage.ownership import read_own_json

SHAPES_FILE: Final = "model_shapes.json"
_VERSION: Final = 1  # raise it with every change after which a trace differs
_MAX_BYTES: Final = 1 << 20
_MAX_SHAPES: Final = 256  # the newest


def cached_shape(digest: str, trace: Callable[[], ModelShape]) -> ModelShape:
    """The shape of the model with this ``digest``: what the file has, else what ``trace`` returns, which is then added."""
    path = default_cache_dir(os.environ) / SHAPES_FILE
    known = _read(path).get(digest)
    if known is not None:
        try:
            return msgspec.convert(known, ModelShape)
        except msgspec.ValidationError:
            pass  # it is traced again
    shape = trace()
    try:
        make_folder(path.parent)
        with file_lock(path.with_name(f".{path.name}.lock")):
            shapes = {**_read(path), digest: asdict(shape)}
            newest = dict(list(shapes.items())[-_MAX_SHAPES:])
            write_atomically(path, json.dumps({"version": _VERSION, "shapes": newest}, indent=1).encode(), mode=0o600)
    except OSError as error:
        logging.getLogger("unisono").info("the shape of the model was not kept: %s", error)
    return shape


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_own_json(path, max_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return {}
    entries = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    shapes = entries.get("shapes") if entries.get("version") == _VERSION else None
    return cast("dict[str, Any]", shapes) if isinstance(shapes, dict) else {}
