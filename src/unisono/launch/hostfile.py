"""Hosts files in three dialects. Names are checked so that neither a shell nor ssh can take them for an option or for syntax.

    n1 slots=4 port=2222 role=worker     ours; role=server and role=scheduler too, # begins a comment
    n1 slots=4 max_slots=8               Open MPI's; n1:4 also means four slots
    n1                                   DMLC's; n1:2222 also means ssh port 2222

The last two disagree about ``n1:N``. 22 and numbers from 1024 on are taken as ports, smaller ones as slots; ``slots=`` and
``port=`` are unambiguous.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.dist.jobspec import ROLES, Role
from unisono.errors import LaunchError, Problem, nearest_name
from unisono.storage.limits import MAX_TEXT_BYTES

# security row 12: never an option of ssh, never a shell's syntax
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*", flags=re.ASCII)
_SSH_PORT = 22
_FIRST_USER_PORT = 1024
_KEYS = ("slots", "max_slots", "max-slots", "port", "role")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine of a job.

    Attributes:
        name: Host name or address, as ssh and the other hosts reach it.
        slots: Number of processes it may run.
        port: Port of its ssh server; None leaves it to the configuration of ssh.
        role: ``worker``, ``server`` or ``scheduler``.
        here: Whether it is the launcher's own machine, used without ssh. Every host of a hosts file is reached over ssh,
            this machine too.
    """

    name: str
    slots: int = 1
    port: int | None = None
    role: Role = "worker"
    here: bool = False


def read_hostfile(path: Path, *, port: int | None = None) -> list[Host]:
    """The hosts of the file at ``path``, in order. ``port`` is the ssh port of hosts that name none.

    Raises LaunchError, listing every line that cannot be read.
    """
    try:
        with path.open("rb") as file:  # a pipe too, as of a shell's <(command)
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES:,} bytes")
        lines = content.decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(_wrong(path, f"cannot be read: {reason}", "a hosts file is text, one host a line")) from None
    hosts: list[Host] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(_host(words, port))
        except ValueError as error:
            given, rule = error.args
            problems.append(_wrong(path, f"line {number}: {given}", rule))
    names = [host.name for host in hosts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(
            _wrong(path, f"{name} is there {names.count(name)} times", "a host has one line; slots=N counts")
        )
    if not problems and not any(host.role == "worker" for host in hosts):
        problems.append(_wrong(path, "no host for workers", "at least one host has role=worker, which is the default"))
    if problems:
        raise LaunchError(*problems)
    return hosts


def _host(words: list[str], port: int | None) -> Host:
    """Parse the words of one line. Raises ValueError(given, rule)."""
    name, separator, number = words[0].rpartition(":")
    if not separator or ":" in name or not number.isdigit():
        name, number = words[0], ""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"host name {name!r}", "a name has letters, digits and . _ : -, and begins with a letter or digit"
        )
    host = Host(name=name, port=port)
    if number:
        is_port = int(number) == _SSH_PORT or int(number) >= _FIRST_USER_PORT
        host = replace(host, port=_number("port", number)) if is_port else replace(host, slots=_number("slots", number))
    for key, value in _settings(words[1:]):
        if key == "role":
            role = next((role for role in ROLES if role == value), None)
            if role is None:
                raise ValueError(f"role={value!r}", f"a role is one of {', '.join(ROLES)}")
            host = replace(host, role=role)
        elif key == "port":
            host = replace(host, port=_number(key, value))
        elif key == "slots":
            host = replace(host, slots=_number(key, value))
        else:
            # Open MPI's limit for oversubscription, which this launcher never does
            _number(key, value)
    return host


def _settings(words: list[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or key not in _KEYS:
            raise ValueError(
                repr(word), f"after the name come {', '.join(_KEYS)}, each as key=value; {nearest_name(key, _KEYS)}"
            )
        yield key, value


def _number(key: str, text: str) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,5}", text, flags=re.ASCII) else 0
    if not 1 <= number < 2**16:
        raise ValueError(f"{key}={text!r}", f"{key} is a whole number from 1 to 65535")
    return number


def _wrong(path: Path, given: str, rule: str) -> Problem:
    return Problem(
        given=f"hosts file {path}, {given}",
        rule=rule,
        consequence="no host was contacted and nothing was started",
        nearest="n1 slots=4 port=22 role=worker",
    )
