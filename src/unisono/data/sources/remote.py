"""Files behind a URL, copied once into the cache folder: ``s3://``, ``gs://``, ``hdfs://`` and any other fsspec filesystem.

A copy is found again by the URL and what the filesystem says of the file's content (ETag, checksum, or size and time).
"""

from __future__ import annotations

import logging
import posixpath
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import xxhash

from unisono.data.recordio.remote_file import is_url
from unisono.errors import DataError, UnisonoError
from unisono.sanitize import without_credentials
from unisono.storage.address import failure_text, open_address, public_cause
from unisono.storage.files import file_lock, open_new, os_reason, sync_folder, temporary_name
from unisono.storage.limits import MAX_EXPANSION, SMALL_FILE_BYTES
from unisono.storage.ownership import make_own_folder

_LOG: Final = logging.getLogger("unisono.data")
_ATTEMPTS: Final = 3
_SIDECARS: Final = (".idx", ".uidx", ".db")
_CHECK: Final = "the address, credentials in the environment, and the network"


def local_path(address: str, cache: Path) -> str:
    """``address`` itself if it is local, else the local copy of the file or folder at it.

    Args:
        address: A path, or the URL of any fsspec filesystem.
        cache: Folder of the copies.

    Raises:
        DataError: See ``local_copies``; or there is not one file or folder.
        ExtraError: See ``local_copies``.
    """
    if not is_url(address):
        return address
    copies = local_copies(address, cache)
    if len(copies) != 1:
        raise DataError(
            given=f"{address}, which " + (f"is {len(copies)} files" if copies else "does not exist"),
            rule="the address is that of one file or folder",
            consequence="nothing was opened",
            nearest="the folder that has the files" if copies else "an address that exists",
        )
    return str(copies[0])


def local_copies(url: str, cache: Path) -> list[Path]:
    """Local copies of the files at ``url``: one file, those that match a glob, or a folder, which is copied whole.

    Raises:
        DataError: Nothing is there, a name leads out of the folder that is copied, or the filesystem or the cache folder cannot
            be read or written.
        ExtraError: fsspec, or the package of the filesystem, is not installed.
    """
    filesystem, path = _filesystem(url)
    try:
        if _is_glob(path):
            return [_copy(filesystem, name, cache) for name in sorted(filesystem.glob(path))]
        if filesystem.isdir(path):
            names = sorted(filesystem.find(path))
            base = f"{path.rstrip('/')}/" if path.strip("/") else filesystem.root_marker
            copies = [(name, _relative(name, base, url)) for name in names]
            facts = _facts(filesystem, names)
            folder = cache / f"remote-{_digest(filesystem, facts)}"
            missing = [facts[name] for name, relative in copies if not (folder / relative).exists()]
            _check_sizes(url, missing, cache)
            for name, relative in copies:
                _copy(filesystem, name, cache, folder / relative)
            return [folder] if names else []
        return [_copy(filesystem, path, cache)] if filesystem.exists(path) else []
    except DataError:
        raise
    except Exception as error:  # filesystems raise errors of their own
        raise _failed(url, error, _CHECK) from public_cause(error, url)


def matching_urls(url: str) -> list[str]:
    """The URLs of the files that a glob matches; another URL itself. Raises as ``local_copies``."""
    filesystem, path = _filesystem(url)
    if not _is_glob(path):
        return [url]
    try:
        return [filesystem.unstrip_protocol(name) for name in sorted(filesystem.glob(path))]
    except Exception as error:
        raise _failed(url, error, _CHECK) from public_cause(error, url)


def _filesystem(url: str) -> tuple[Any, str]:
    """The filesystem of ``url``, and the path in it. Raises as ``local_copies``."""
    try:
        return open_address(url, f"the address {url!r}")
    except UnisonoError:
        raise
    except ValueError as error:
        raise _failed(url, error, "an address such as s3://bucket/file.parquet") from public_cause(error, url)
    except Exception as error:  # filesystems that connect, or open an archive, raise errors of their own
        raise _failed(url, error, _CHECK) from public_cause(error, url)


def _is_glob(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _relative(name: str, base: str, url: str) -> str:
    """The path of ``name`` below ``base``. Raises DataError for one that leads out of it: archives may have any name."""
    below = posixpath.normpath(name.removeprefix(base))
    if below in (".", "..") or below.startswith(("/", "../")) or "\0" in below:
        raise DataError(
            given=f"{url} has a file named {name!r}",
            rule="files are copied below one folder, so their names are relative and do not lead out of it",
            consequence="nothing was copied: the file would lie outside of the cache folder",
            nearest="an archive without that file, or one made from inside of its folder",
        )
    return below


def _copy(filesystem: Any, name: str, cache: Path, target: Path | None = None) -> Path:
    """Copy one file, and the indexes beside it where it is copied alone; returns the copy."""
    if target is None:
        target = (
            cache
            / f"remote-{_digest(filesystem, _facts(filesystem, [name]))}"
            / _relative(name.rsplit("/", 1)[-1], "", name)
        )
        stem = name.rsplit(".", 1)[0]
        for beside in (name + ".db", *(stem + suffix for suffix in _SIDECARS)):
            if beside != name and filesystem.exists(beside):
                _copy(filesystem, beside, cache, target.parent / beside.rsplit("/", 1)[-1])
    try:
        make_own_folder(cache, option="data.cache_dir")
        make_own_folder(target.parent, option="data.cache_dir")
        lock = target.with_name(f".{target.name}.lock")  # hidden, as not to be taken for one of the files of its folder
        with file_lock(lock):
            if not target.exists():
                _download(filesystem, name, target)
        lock.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError | ConnectionError | TimeoutError):
            raise
        raise DataError(
            given=f"the cache folder {cache}: {os_reason(error)}",
            rule="files behind a URL are copied into a folder this user can write, with room for them",
            consequence="the data cannot be read",
            nearest="data.cache_dir with another folder, or room there",
        ) from error
    return target


def _download(filesystem: Any, name: str, target: Path) -> None:
    """Fetch the file to its place, complete or not at all; a copy of another length is tried again."""
    facts: dict[str, Any] = filesystem.info(name)
    _check_sizes(without_credentials(name), [facts], target.parent)
    size = int(facts["size"])
    temporary = temporary_name(target.with_name(f".{target.name}"))
    try:
        open_new(temporary).close()  # with our permissions, and no link
        for attempt in range(1, _ATTEMPTS + 1):
            _LOG.info("%s is copied to %s", without_credentials(name), target)
            filesystem.get_file(name, str(temporary))
            if (got := temporary.stat().st_size) == size:
                break
            if attempt == _ATTEMPTS:
                raise _failed(name, OSError(f"{got} of {size} bytes arrived, {_ATTEMPTS} times"), "the network")
        temporary.rename(target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _check_sizes(what: str, files: Sequence[Mapping[str, Any]], cache: Path) -> None:
    """Refuse files that fill the disk, or that an archive has compressed as no real data can be. ``files`` are fsspec's facts."""
    size = sum(int(facts["size"]) for facts in files)
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    packed = [facts["compress_size"] for facts in files if "compress_size" in facts]
    most = SMALL_FILE_BYTES + MAX_EXPANSION * sum(packed)
    if packed and size > most:
        raise DataError(
            given=f"{what}: {sum(packed):,} compressed bytes, which are {size:,} bytes unpacked",
            rule=f"a file of an archive expands {MAX_EXPANSION} times at most, or to {SMALL_FILE_BYTES >> 20} MiB",
            consequence="nothing was copied",
            nearest="unpack the archive by hand, if this is its real content",
        )
    if size > free:
        raise DataError(
            given=f"{what}: {size:,} bytes, and {folder} has {free:,} bytes free",
            rule="files behind a URL are copied into a folder with room for them",
            consequence="nothing was copied",
            nearest="data.cache_dir with another folder, or room there",
        )


def _facts(filesystem: Any, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the filesystem says of each file."""
    return {name: filesystem.info(name) for name in names}


def _digest(filesystem: Any, facts: Mapping[str, Mapping[str, Any]]) -> str:
    marks: list[Any] = []
    for name, info in facts.items():
        content = info.get("ETag") or info.get("md5Hash") or info.get("crc32c") or info.get("CRC")
        times = [str(info[key]) for key in ("LastModified", "mtime", "modificationTime", "created") if key in info]
        marks.append((type(filesystem).__name__, name, info["size"], content or times))
    return xxhash.xxh3_128_hexdigest(repr(marks).encode())


def _failed(url: str, error: BaseException, nearest: str) -> DataError:
    return DataError(
        given=f"{url}: {failure_text(error, url)}",
        rule="the data at an address can be listed and read",
        consequence="nothing was opened",
        nearest=nearest,
    )
