"""Addresses of fsspec: ``s3://``, ``gs://``, ``zip://…::file.zip`` and others. fsspec is imported when one is opened."""

from __future__ import annotations

import importlib
import os
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from unisono.errors import ConfigError, ExtraError, missing_extra
from unisono.sanitize import REDACTED, without_credentials_of

# what to install for a module whose package has another name
_PACKAGES: Final = {"smbclient": "smbprotocol", "lakefs_spec": "lakefs-spec", "yarl": "aiohttp"}


def open_address(address: str, purpose: str, **options: Any) -> tuple[Any, str]:
    """The filesystem of an address, and the path in it. Some filesystems connect here, and raise errors of their own.

    Args:
        address: What fsspec opens.
        purpose: What needs it, for the text of an error, such as "the address 's3://…'".
        options: Further arguments of the filesystem.

    Raises:
        ConfigError: The address was read from a run's folder, which keeps no credentials.
        ExtraError: fsspec, or the package of the filesystem, is not installed.
    """
    if f"{REDACTED}@" in address or f"={REDACTED}" in address:
        raise ConfigError(
            given=f"{purpose}, which had credentials when the run was started",
            rule="files of a run keep no credentials of addresses",
            consequence="nothing was opened",
            nearest="the full address again, by --set or a variable UNISONO__SECTION__NAME; or credentials in the environment, "
            "as the filesystem's package reads them",
        )
    try:
        fsspec: Any = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise missing_extra("remote", "fsspec", purpose) from error
    try:
        return fsspec.url_to_fs(address, **options)
    except ImportError as error:
        raise _missing_package(error, address, purpose) from public_cause(error, address)


def failure_text(error: BaseException, address: str) -> str:
    """Class and text of an error about ``address``, without its credentials."""
    return without_credentials_of(address, f"{type(error).__name__}: {error}")


def public_cause(error: BaseException, address: str) -> BaseException | None:
    """``error`` as the cause of another one; None if it quotes credentials, since Python prints causes as they are."""
    text = "".join(traceback.format_exception(error))
    return error if without_credentials_of(address, text) == text else None


def local_path(filesystem: Any, path: str) -> Path | None:
    """The real path of ``path`` on this machine, also behind a cache or a folder of fsspec; None for another filesystem."""
    while hasattr(inner := getattr(filesystem, "fs", None), "protocol"):
        join = getattr(filesystem, "_join", None)  # of DirFileSystem, whose paths are relative to its folder
        filesystem, path = inner, path if join is None else join(path)
    protocol = filesystem.protocol
    names: tuple[str, ...] = (protocol,) if isinstance(protocol, str) else tuple(protocol)
    return Path(path).expanduser().resolve() if "file" in names or "local" in names else None


def is_within(inner: Path, outer: Path) -> bool:
    """Whether ``inner`` is ``outer`` or lies below it, also through links and mounts. Neither has to exist."""
    inner, outer = inner.resolve(), outer.resolve()
    for folder in (inner, *inner.parents):
        if folder == outer:
            return True
        with suppress(OSError):
            if os.path.samefile(folder, outer):
                return True
    return False


def _missing_package(error: ImportError, address: str, purpose: str) -> ExtraError:
    said = without_credentials_of(address, str(error))
    # fsspec replaces the error of the import by one that has a text of its own and no name
    module = next(
        (e.name for e in (error, error.__cause__, error.__context__) if isinstance(e, ImportError) and e.name), ""
    )
    package = _PACKAGES.get(module.partition(".")[0], module.partition(".")[0])
    return ExtraError(
        given=f"{purpose} needs the package {package!r}, which is not installed"
        if package
        else f"{purpose} needs a package that is not installed: {said}",
        rule=f"fsspec reads {address.split('://', 1)[0]}:// through a package of its own; it says {said!r}",
        consequence="nothing was started",
        nearest=f"pip install {package}" if package else "install it",
    )
