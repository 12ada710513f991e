"""Environment variables that are forwarded to processes on other hosts: those of a short list and those of ``--env``.

A remote process inherits its own host's environment, not the launcher's. Variables that look like credentials, and addresses
with a password in them, are never forwarded (dmlc's tracker put AWS keys on the remote command line).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence

from unisono.dist.jobspec import OWN_VARIABLES
from unisono.errors import LaunchError, Problem
from unisono.sanitize import has_password, is_secret

_LOG = logging.getLogger("unisono")
_NAMES = {"CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "GLIBC_TUNABLES"}
_PREFIXES = ("UNISONO_", "NCCL_", "GLOO_", "OMP_", "MKL_", "MALLOC_")
_CREDENTIAL = re.compile(
    r"AWS_.*|.*(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|_PAT|_SAS|CREDENTIALS)|UNISONO_SECRET_.*", flags=re.IGNORECASE
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", flags=re.ASCII)
_NAME_RULE = "a variable's name has letters, digits and _"
# each process gets its own place in the job
_PLACES = OWN_VARIABLES | {"UNISONO_LAUNCH", "UNISONO_LOGS"}


def forwarded(environ: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``environ`` to forward, updated by ``extra``.

    A name that no shell would take, which a program can still set, is not forwarded. One that is left out for the password in
    its value is logged.
    """
    chosen = {
        name: value
        for name, value in environ.items()
        if (name in _NAMES or name.startswith(_PREFIXES))
        and _NAME.fullmatch(name)
        and not _is_credential(name)
        and name not in _PLACES
        and name not in extra
    }
    for name in [name for name, value in chosen.items() if name not in _NAMES and has_password(value)]:
        del chosen[name]
        _LOG.warning(
            "%s is not forwarded to other hosts: its value has a password. Set it in the environment of each host",
            name,
        )
    return chosen | dict(extra)


def parse_settings(settings: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Parse ``--env`` values: ``A=1`` sets A to "1", ``B`` takes B from ``environ``. Raises LaunchError with all problems."""
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    for text in settings:
        name, separator, value = text.partition("=")
        if not _NAME.fullmatch(name):
            problems.append(_wrong(name, _NAME_RULE, "--env NAME=VALUE"))
        elif _is_credential(name):
            problems.append(
                _wrong(name, "credentials are never forwarded", "a file on every host that its owner alone reads")
            )
        elif name in variables:
            problems.append(_wrong(name, "each variable is given once", f"one --env {name}=VALUE"))
        elif not separator and name not in environ:
            problems.append(
                _wrong(name, "without a value the launcher's own is forwarded, and it has none", f"--env {name}=VALUE")
            )
        elif name not in _NAMES and has_password(value if separator else environ[name]):
            problems.append(
                _wrong(name, "an address with a password is never forwarded", "the environment of each host")
            )
        else:
            variables[name] = value if separator else environ[name]
    if problems:
        raise LaunchError(*problems)
    return variables


def require_names(names: Iterable[str]) -> list[str]:
    """``names`` sorted, for a remote shell, ``--export`` or ``-x``. Raises LaunchError for one that could mean more there."""
    names = sorted(names)
    if wrong := [name for name in names if not _NAME.fullmatch(name)]:
        raise LaunchError(
            given=f"environment variable {wrong[0]!r}",
            rule=_NAME_RULE,
            consequence="a remote shell could read it as a command, so nothing was started",
            nearest="a name such as MY_VARIABLE",
        )
    return names


def _is_credential(name: str) -> bool:
    return _CREDENTIAL.fullmatch(name) is not None or is_secret(name)


def _wrong(name: str, rule: str, nearest: str) -> Problem:
    # the value is not shown: it may be a secret
    return Problem(given=f"--env {name!r}", rule=rule, consequence="nothing was started", nearest=nearest)
