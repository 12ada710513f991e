"""Losses, gradient norms, samples and checkpoint tensors of a finished run, as a flat mapping of comparable text.

Reads the files by their formats alone: JSON lines, manifests, safetensors. Tensors are put together from their pieces, so
they compare by state path and content however a checkpoint was divided among ranks; a second entry compares the pieces.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

# event kind -> the fields that are the same in every run of the same configuration; "train/" stands for all under it
_FIELDS = {
    "step": ("train/",),
    "eval": ("eval/",),
    "skipped_step": ("reason", "loss", "grad_norm", "samples"),
    "data_skipped": ("samples",),
    "gradient_stats": ("layers",),
    "compression": ("codec",),
    "early_stop": ("best_loss", "loss"),
    "sample": ("text",),
    "resumed": ("path", "differences"),
    "run_end": ("reason",),
}
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def of_run(folder: Path, *, label: str = "") -> dict[str, str]:
    """Everything comparable in a run folder: ``{"step 3 train/loss": "5.25", "checkpoint 4 tensor model.x": "F32 …"}``."""
    found: dict[str, str] = {}
    for path in sorted((folder / "events").glob("rank*.jsonl")):
        rank = int(path.stem.removeprefix("rank"))
        for line in path.read_bytes().splitlines():
            found |= _of_event(json.loads(line), f"rank {rank} " if rank else "")
    for path in sorted((folder / "checkpoints").glob("step-*")):
        if (path / "COMMIT").exists():
            found |= of_checkpoint(path)
    for path in sorted((folder / "export").glob("*")):
        found[f"export {path.name}"] = digest(path.read_bytes())
    return {label + name: value for name, value in found.items()}


def _of_event(event: dict[str, Any], rank: str) -> dict[str, str]:
    """The comparable fields of an event. A step done again after a restart takes the place of its first record."""
    wanted = _FIELDS.get(event["kind"], ())
    where = f"{rank}{event['kind']} {event['step']}" if "step" in event else f"{rank}{event['kind']}"
    return {
        f"{where} {name}": json.dumps(value, sort_keys=True)
        for name, value in event.items()
        if name in wanted or any(prefix.endswith("/") and name.startswith(prefix) for prefix in wanted)
    }


def of_checkpoint(folder: Path) -> dict[str, str]:
    """Digests of each tensor, of the division into pieces, and of the fields whose spelling is part of the format."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    here = f"checkpoint {manifest['step']}"
    meta, tensors = manifest["meta"], manifest["tensors"]
    found = {
        f"{here} fields": " ".join([*sorted(manifest), "|", *sorted(meta), "|", *sorted(meta.get("environment", ()))]),
        f"{here} state": json.dumps(meta.get("state"), sort_keys=True),
        f"{here} order": json.dumps(meta.get("order"), sort_keys=True),
        f"{here} pieces": digest(json.dumps(tensors, sort_keys=True).encode()),
    }
    headers = {name: _header(folder / name) for name in manifest["files"]}
    for path, entry in tensors.items():
        size = _ITEM_BYTES[entry["dtype"]]
        whole = np.zeros((*entry["shape"], size), np.uint8)
        for piece in entry["pieces"]:
            begin, end = headers[piece["file"]][piece["key"]]
            data = np.memmap(folder / piece["file"], np.uint8, "r")[begin:end]
            box = tuple(
                slice(first, first + extent) for first, extent in zip(piece["offset"], piece["shape"], strict=True)
            )
            whole[box] = data.reshape((*piece["shape"], size))
        found[f"{here} tensor {path}"] = f"{entry['dtype']} {entry['shape']} {digest(whole.tobytes())}"
    return found


def _header(path: Path) -> dict[str, tuple[int, int]]:
    """Key -> where its bytes lie in a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {key: tuple(8 + size + offset for offset in entry["data_offsets"]) for key, entry in header.items()}


def of_files(folder: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    """Digests of the files under ``folder`` that match."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return {f"file {path.relative_to(folder)}": digest(path.read_bytes()) for path in paths}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]
