"""A real ssh server on loopback that plays two hosts, 127.0.0.1 and 127.0.0.2, with keys of its own.

The client's configuration reaches ssh by a program of that name at the front of PATH, as a user's would by ``~/.ssh/config``,
which ssh finds by the password database and not by HOME.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from procs import wait_until
from tools import missing

HOSTS = ("127.0.0.1", "127.0.0.2")


@dataclass(frozen=True)
class Sshd:
    """``environ`` is for whoever calls ssh; ``arguments`` are those of every ssh so far, one list each."""

    port: int
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        return {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    @property
    def arguments(self) -> list[list[str]]:
        log = self.folder / "arguments"
        texts = log.read_bytes().split(b"\0\0") if log.exists() else []
        return [[part.decode() for part in text.split(b"\0")] for text in texts if text]

    def hosts(self, slots: int) -> list[dict[str, object]]:
        return [{"name": name, "slots": slots, "port": self.port} for name in HOSTS]


@contextmanager
def serve(folder: Path) -> Iterator[Sshd]:
    """Runs the server; skips the test where OpenSSH is not installed (.ci/run installs it)."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
    client = shutil.which("ssh")
    if server is None or client is None:
        pytest.skip(f"openssh is not installed: no {' and no '.join(missing('sshd', 'ssh'))}")
    if os.geteuid() == 0:
        # where a server started by root separates its privileges
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.create_server((HOSTS[0], 0)) as probe:
        port = int(probe.getsockname()[1])
    (folder / "server.conf").write_text(
        "\n".join(
            [
                *(f"ListenAddress {host}:{port}" for host in HOSTS),
                f"HostKey {folder / 'host'}",
                f"AuthorizedKeysFile {folder / 'user.pub'}",
                "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPrintMotd no",
                # login shells that talk are common, and must not be taken for the agent
                # or drive this terminal
                r"ForceCommand printf 'Hello\033[2Jcome back\n'; printf '\033[8ma complaint\n' >&2;"
                ' eval "$SSH_ORIGINAL_COMMAND"\n',
            ]
        )
    )
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"[{host}]:{port} {key}\n" for host in HOSTS))
    (folder / "client.conf").write_text(
        f"IdentityFile {folder / 'user'}\nIdentitiesOnly yes\nUserKnownHostsFile {folder / 'known_hosts'}\n"
    )
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    log = folder / "arguments"
    wrapper.write_text(
        f"#!/bin/sh\nfor part; do printf '%s\\0' \"$part\"; done >> {log}; printf '\\0' >> {log}\n"
        f'exec {client} -F {folder / "client.conf"} "$@"\n'
    )
    wrapper.chmod(0o700)
    with (folder / "server.log").open("wb") as said:
        process = subprocess.Popen([server, "-D", "-e", "-f", str(folder / "server.conf")], stderr=said)
    try:
        wait_until(lambda: "Server listening on 127.0.0.2" in (folder / "server.log").read_text(), "sshd listens")
        yield Sshd(port, folder)
    finally:
        process.terminate()
        process.wait()
