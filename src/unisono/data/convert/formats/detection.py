"""The format of a file name, and the set of files that it stands for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from unisono.data.convert.formats.idx import NAME as IDX_NAME
from unisono.data.convert.formats.table import unreadable_error

_OF: Final = re.compile(r"(.*)-([0-9]{5,9})-of-([0-9]{5,9})(.*)")
_MAX_SHARDS: Final = 100_000
_CIFAR10: Final = re.compile(r"data_batch_[1-5]\.bin")
_MINDRECORD: Final = re.compile(r".*\.mindrecord[0-9]{0,4}")


def format_of(path: Path) -> str:
    """The suffix that names the format; ``idx`` for MNIST's files, which have none."""
    match = _OF.fullmatch(path.name)
    name = path.name if match is None else match[1] + match[4]
    if IDX_NAME.fullmatch(name):
        return "idx"
    if _MINDRECORD.fullmatch(name):
        return ".mindrecord"
    if name.endswith(".tar.gz"):
        return ".tar.gz"
    return Path(name).suffix


def is_shard(path: Path) -> bool:
    """Whether the name is that of one of several files."""
    return _OF.fullmatch(path.name) is not None


def files_of(path: Path) -> list[Path]:
    """The files of the set that ``path`` belongs to, in order; else ``path`` itself. Raises DataError if one is missing.

    Sets are ``name-00000-of-00005…``, counted from 0, and CIFAR-10's five ``data_batch_N.bin``. MindRecord handles its own sets.
    """
    match = _OF.fullmatch(path.name)
    if match is not None:
        stem, number, total, rest = match.groups()
        if not 0 <= int(number) < int(total) <= _MAX_SHARDS:
            raise unreadable_error(
                f"{path}", f"shards are counted from 0, up to {_MAX_SHARDS:,} of them", "another name for a single file"
            )
        files = [path.with_name(f"{stem}-{shard:0{len(number)}}-of-{total}{rest}") for shard in range(int(total))]
    elif _CIFAR10.fullmatch(path.name):
        files = [path.with_name(f"data_batch_{batch}.bin") for batch in range(1, 6)]
    else:
        return [path]
    missing = [file for file in files if not file.exists()]
    if missing:
        raise unreadable_error(
            f"{path}, one of {len(files)} files, of which {len(missing)} are missing: first {missing[0].name}",
            "naming one file of a set takes all of it, in order",
            "the missing files, or a copy of this one under a name without a number",
        )
    return files
