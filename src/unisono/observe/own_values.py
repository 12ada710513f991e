"""What a user's loop logs by name and step: numbers, texts and pictures, in the event log and all that is made of it.

A number is a field of its event. A text or a picture is a file in ``media/`` of the run folder, which its event names.
"""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np

from unisono.errors import ConfigError
from unisono.observe.events import ENVELOPE, EventLog
from unisono.observe.metric_names import GROUPS
from unisono.sanitize import is_secret, redact_text
from unisono.storage.directory import make_folder, numbered_name
from unisono.storage.files import os_reason, write_atomically
from unisono.storage.limits import MAX_PIXELS
from unisono.storage.run_folder import MEDIA_FOLDER

_NAME = re.compile(r"[A-Za-z_][\w.-]*(/(?!\.+(/|$))[\w.-]+)*", re.ASCII)
# names that rows and events have; the first parts in GROUPS are those of a run's own numbers
_FIELDS = ENVELOPE | {"self", "step", "steps_total", "epochs_total", "eta_s", "unit"}
_MAX_NAME = 200  # characters: parts of a name are names of folders
MAX_TEXT_BYTES: Final = 1 << 20


def log_value(events: EventLog, step: int, name: str, value: Any) -> None:
    """Record ``value``, a number or anything with one (a tensor or array of one element), under ``name`` at ``step``.

    Raises:
        ConfigError: The name is not plain, is one of the run's own or that of a secret, or the value is no number.
    """
    _check_name(name, "log")
    try:
        # torch warns of the conversion of a tensor that requires a gradient
        plain = value.detach() if getattr(value, "requires_grad", False) else value
        number = None if isinstance(value, str | bytes) else float(plain)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise ConfigError(
            given=f"log of {name!r} with {_described(value)}",
            rule="a logged value is one number, or a tensor or array of one element",
            consequence="nothing was logged",
            nearest=f"run.log({name!r}, values.mean())",
        )
    events.emit("log", step=step, **{name: number})


def log_text(events: EventLog, run_dir: Path, step: int, name: str, text: Any) -> None:
    """Record a text of at most 1 MiB under ``name`` at ``step``; what looks like a secret in it is redacted.

    Raises:
        ConfigError: The name cannot be taken, as for ``log_value``; or the text is none or too long.
    """
    _check_name(name, "log_text")
    data = redact_text(text).encode("utf-8", "backslashreplace") if isinstance(text, str) else b""
    if not isinstance(text, str) or len(data) > MAX_TEXT_BYTES:
        given = f"{len(data):,} bytes" if isinstance(text, str) else _described(text)
        raise ConfigError(
            given=f"log_text of {name!r} with {given}",
            rule=f"a logged text is a str of at most {MAX_TEXT_BYTES:,} bytes of UTF-8",
            consequence="nothing was logged",
            nearest=f"run.log_text({name!r}, text[:100_000])" if data else f"run.log_text({name!r}, str(value))",
        )
    path = _write(events, run_dir, step, name, "txt", data)
    if path is not None:
        events.emit("log_text", step=step, name=name, path=path)


def log_image(events: EventLog, run_dir: Path, step: int, name: str, image: Any) -> None:
    """Record a picture under ``name`` at ``step``, as PNG.

    Args:
        image: uint8 array or tensor [H, W, 3] (RGB), [H, W, 1] or [H, W] (gray), of at most 2^26 pixels.

    Raises:
        ConfigError: The name cannot be taken, as for ``log_value``; or the picture is none.
    """
    _check_name(name, "log_image")
    pixels = _as_array(image)
    if pixels is not None and pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if (
        pixels is None
        or pixels.dtype != np.uint8
        or pixels.ndim != 3
        or pixels.shape[2] not in (1, 3)
        or not 0 < pixels.shape[0] * pixels.shape[1] <= MAX_PIXELS
    ):
        raise ConfigError(
            given=f"log_image of {name!r} with {_described(image)}",
            rule="a picture is a uint8 array [H, W, 3] or [H, W] of 0 to 255, with at least one pixel and at most 2^26",
            consequence="nothing was logged",
            nearest=f"run.log_image({name!r}, (255 * x).clip(0, 255).astype('uint8')); of a tensor [3, H, W], x.permute(1, 2, 0)",
        )
    height, width, channels = pixels.shape
    path = _write(events, run_dir, step, name, "png", _png(pixels))
    if path is not None:
        events.emit("log_image", step=step, name=name, path=path, height=height, width=width, channels=channels)


def _check_name(name: str, call: str) -> None:
    """Raise ConfigError for a name that ``run.<call>`` does not take."""
    taken = name.partition("/")[0] in GROUPS or name in _FIELDS
    if _NAME.fullmatch(name) and not taken and not is_secret(name) and len(name) <= _MAX_NAME:
        return
    if taken:
        rule = f"{', '.join(sorted(GROUPS))} and {', '.join(sorted(_FIELDS))} are names of the run's own numbers"
    elif is_secret(name):
        rule = "a value whose name is that of a secret is never written"
    else:
        rule = f"a name has ASCII letters, digits, _ . - and / between its parts, {_MAX_NAME} characters at most"
    plain = "" if is_secret(name) else re.sub(r"[^\w.]+", "_", name, flags=re.ASCII).strip("_.")[:50]
    raise ConfigError(
        given=f"{call} of {name!r}",
        rule=rule,
        consequence="nothing was logged",
        nearest=f"run.{call}('own/{plain or 'value'}', …)",
    )


def _described(value: Any) -> str:
    """Type of a value, of an array also dtype and shape: ``a Tensor [2]``."""
    sizes, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    of = f" of {str(dtype).removeprefix('torch.')}" if dtype is not None and str(dtype) != "torch.float32" else ""
    return f"a {type(value).__name__}{of}" + (f" {list(sizes)}" if sizes is not None else "")


def _as_array(image: Any) -> Any:
    """``image`` as an array on the host; None if it is none."""
    if isinstance(image, np.ndarray):
        return image
    try:
        return image.detach().cpu().numpy()
    except (AttributeError, TypeError, RuntimeError):
        return None


def _write(events: EventLog, run_dir: Path, step: int, name: str, suffix: str, data: bytes) -> str | None:
    """Write the payload of an event of this rank; returns its path in the run folder. A full disk is a warning and None."""
    path = Path(MEDIA_FOLDER, f"rank{events.rank:05d}", name, f"{numbered_name('step', step)}.{suffix}")
    try:
        make_folder((run_dir / path).parent)
        write_atomically(run_dir / path, data)
    except OSError as error:
        message = f"{path} could not be written ({os_reason(error)}); it is not logged, training continues"
        events.emit("warning", step=step, code="media_not_written", message=message)
        return None
    return str(path)


def _png(pixels: Any) -> bytes:
    """PNG (RFC 2083) of ``pixels`` [H, W, 1 or 3], uint8; rows are not filtered."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter, 0
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
