"""TLS 1.3 between workers and servers, from a folder on every host: ``certificate.pem``, ``key.pem``,
``authority.pem``.

Both sides show a certificate of the job's own authority. A worker also checks that a server's certificate names the
address it connected to. A server does not check a worker's address: the proof of the secret (``auth``) follows inside.
``UNISONO_TLS`` names the folder; it is not secret. A key never leaves its file.
"""

from __future__ import annotations

import contextlib
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import ConfigError
from unisono.kvstore.wire.auth import AuthError

TLS_VARIABLE = "UNISONO_TLS"
_FILES = _CERTIFICATE, _KEY, _AUTHORITY = "certificate.pem", "key.pem", "authority.pem"
_RULE = "a folder for TLS has certificate.pem, key.pem and the authority.pem that signed all certificates of the job, in PEM"
_NOTHING = "no connection was made and no port opened"


@dataclass(frozen=True, slots=True)
class TLSContexts:
    """The contexts to serve and to connect."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def read_tls(environ: Mapping[str, str]) -> TLSContexts | None:
    """The contexts of the folder in UNISONO_TLS; None where it is unset. Raises as ``load_tls``."""
    folder = environ.get(TLS_VARIABLE)
    return load_tls(Path(folder)) if folder else None


def load_tls(folder: Path) -> TLSContexts:
    """Read the files of ``folder`` and try them on each other.

    Raises ConfigError where one is missing, others can read the key, or the certificate is not signed by the folder's
    authority, for this key, and valid today.
    """
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        given = f"{folder} has no {' and no '.join(missing)}" if folder.is_dir() else f"{folder} is no folder"
        raise _wrong(given, "docs/kvstore.md has the two commands that make them")
    mode = stat.S_IMODE((folder / _KEY).stat().st_mode)
    if mode & 0o077:
        given = f"{folder / _KEY} has mode {mode:04o}, so others than its owner can read it"
        raise _wrong(given, f"chmod 600 {folder / _KEY}")
    try:
        contexts = TLSContexts(_context(folder, ssl.PROTOCOL_TLS_SERVER), _context(folder, ssl.PROTOCOL_TLS_CLIENT))
        trial = _context(folder, ssl.PROTOCOL_TLS_CLIENT)
        trial.check_hostname = False  # the name that peers will use is not known here
        _shake_hands(trial, contexts.server)
    except (OSError, ValueError) as error:
        check = f"openssl verify -CAfile {folder / _AUTHORITY} {folder / _CERTIFICATE}"
        raise _wrong(f"the TLS files in {folder} cannot be used ({_reason(error)})", check) from error
    return contexts


def permanent_tls_error(error: BaseException | None, address: str) -> AuthError | None:
    """The error of a connection to ``address`` that no retry can fix; None for other errors."""
    if isinstance(error, ssl.SSLCertVerificationError):
        given = f"the certificate of the server at {address} is not accepted here: {error.verify_message}"
        nearest = "authority.pem is the same on all hosts, and a certificate names its host as the others call it"
    elif isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        given = f"the server at {address} did not accept this side's certificate ({_reason(error)})"
        nearest = "authority.pem is the same on all hosts; on this one: openssl x509 -in certificate.pem -noout -text"
    elif isinstance(error, ssl.SSLError) and (error.reason or "") in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        given = f"the server at {address} does not speak TLS"
        nearest = "the same launch.tls for servers and workers"
    else:
        return None
    rule = "with TLS both sides show a certificate that the job's authority signed"
    return AuthError(given=given, rule=rule, consequence="nothing was sent to it", nearest=nearest)


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / _CERTIFICATE, folder / _KEY, password=_no_password)
    context.load_verify_locations(folder / _AUTHORITY)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Handshake in memory. Raises ssl.SSLError where either side refuses the other."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for end in ends * 2:  # hello, hello and certificate, certificate, its check
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error)


def _wrong(given: str, nearest: str) -> ConfigError:
    return ConfigError(given=given, rule=_RULE, consequence=_NOTHING, nearest=nearest)
