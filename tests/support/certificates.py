"""Folders with certificates, made as docs/kvstore.md says."""

from __future__ import annotations

import subprocess
from pathlib import Path

NEW_KEY = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365"
_PAST = "[ca]\ndefault_ca=c\n[c]\ndatabase=index\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\npolicy=p\n[p]\n"


class Authority:
    """An authority of its own in ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        _run(f"{NEW_KEY} -subj /CN=jobs -keyout authority.key -out authority.pem", folder)

    def host(self, name: str, *names: str) -> Path:
        """A folder for TLS whose certificate has ``names``, such as ``IP:127.0.0.1``."""
        made = self._folder / name
        made.mkdir()
        ours = (
            f"{NEW_KEY} -subj /CN={name} -CA ../authority.pem -CAkey ../authority.key -addext basicConstraints=CA:FALSE"
        )
        names = names or ("IP:127.0.0.1",)
        _run(f"{ours} -addext subjectAltName={','.join(names)} -keyout key.pem -out certificate.pem", made)
        (made / "authority.pem").write_bytes((self._folder / "authority.pem").read_bytes())
        return made

    def expire(self, folder: Path) -> None:
        """Put a certificate there that held until the year 2001."""
        (folder / "past.cnf").write_text(_PAST)
        (folder / "index").touch()
        (folder / "serial").write_text("01")
        _run("openssl req -new -key key.pem -subj / -addext subjectAltName=IP:127.0.0.1 -out request.pem", folder)
        when = "-startdate 20000101000000Z -enddate 20010101000000Z"
        sign = "openssl ca -batch -config past.cnf -notext -cert ../authority.pem -keyfile ../authority.key"
        _run(f"{sign} {when} -in request.pem -out certificate.pem", folder)


def _run(command: str, folder: Path) -> None:
    done = subprocess.run(command.split(), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
