"""Cleaning of text before it is stored or shown: redacts secrets, shows control characters as text.

Redaction works on names (``hf_token``, ``AWS_SECRET_ACCESS_KEY``), on ``user:password@`` and signatures in URLs, and on
``name=value``, ``--name value`` and ``"name": "value"`` inside any text. A secret under an innocent name is not
recognised. Standard library only; imports nothing else of unisono.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

REDACTED = "[redacted]"
_LEAST_SECRET = 4  # characters: "me" stands in many words

_SECRET_WORD = re.compile(
    r"\w*(?:secrets?|passw(?:or)?ds?|passphrases?|credentials?|apikeys?)|authorizations?|cookies?|bearer"
    r"|(?:hf|gh|api|auth|access|refresh|bearer|session|login|bot|git|github|gitlab|wandb)tokens?"
)
_OWNER = re.compile(  # before "key" and "tokens"
    r"api|access|account|private|secret|auth|client|encryption|master|session|signing|ssh|storage|hmac|deploy"
    r"|hf|gh|github|gitlab|wandb|huggingface|openai|azure|bearer|refresh|bot|login"
)
_VOCABULARY = re.compile(r"eos|bos|pad|unk|sep|cls|mask|start|end|special|per")
# Short names, which are secrets in a list of arguments. Elsewhere they are words: "pass: ok", a metric own/pass.
_SHORT_NAME = re.compile(r"pwds?|pass|pws?|auths?")
# before "pass": one over the data or the layers
_PASS_KIND = re.compile(
    r"forward|backward|first|second|last|next|single|multi|one|two|each|per|all|by|low|high|band|full"
)
_FOLDERS = ("PWD", "OLDPWD")
_COUNT = re.compile(r"\s*[\d.,_]+(?:[eE][+-]?\d+)?[kKMGTB]?\s*")

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# The text may be hostile, and long: what one place of it has been searched for is not searched again from the next place.
# A path has one slash where an address has two.
_BEFORE_USERINFO = r"(?:(?<=://)|(?<=\w\w:/)(?!/))"
_USERINFO = re.compile(rf"{_BEFORE_USERINFO}[^/\s?#]*@")
# A password with one of / ? # in it, which a URL must not have but people type. What follows the colon of HOST:PORT is a number.
_MISTYPED_USERINFO = re.compile(rf"{_BEFORE_USERINFO}[^/\s?#:@\[]{{0,256}}:(?!:|\d{{0,5}}(?:[/?#\s'\",)\]}}>]|$)).*@")
_NO_SPACE = re.compile(r"[^\s'\"]+")
_URL_PARAMETER = re.compile(r"([?&]([\w.-]{1,128})=)[^&#\s'\"]+")
# secret in the query of an address, not elsewhere: a signature of an address that is signed for a time, and short names
_SECRET_PARAMETER = re.compile(r"sig|(?:[\w.-]*-)?signature|key|pass|pwd|pw|auth", flags=re.IGNORECASE)
_NAME = r"(?<![\w.-])([.-]*+)(\w[\w.-]*+)"  # only whole: a part of one would be looked at again for each of its words
_END_OF_NAME = 128  # characters by which a name is judged
_NAME_BEFORE_VALUE = re.compile(_NAME + r"(=|[\"']?\s*+:\s*+|\s++)(?=\S)")
# in an argument of a command, where "password = x" is no line of a program
_NAME_IN_ARGUMENT = re.compile(_NAME + r"(\s*+=\s*+|[\"']?\s*+:\s*+|\s++)(?=\S)")
_OPTION = re.compile(r"--?\w[\w.-]*:?|\w[\w.-]*:")  # the value is the next argument
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s,;&)}\]]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{16,}")
_AUTHORIZATION = re.compile(r"(?i)\b(authorization\s*[:=]\s*)(?=\S)[^\r\n'\"]+")
# after "password: x" without quotes: prose goes on with another word
_END_OF_VALUE = re.compile(r"[ \t]*(?:[\r\n,;)}\]'\"]|$)")

# C0 and C1 controls, and the marks that reorder or hide text (Trojan Source, CVE-2021-42574; those with which Unicode writes
# invisible text). The joiners U+200C and U+200D and the selector U+FE0F do neither: Persian and emoji need them.
_CONTROL = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b\\u200e\\u200f\\u2028-\\u202e"
    "\\u2060-\\u206f\\u3164\\ud800-\\udfff\\ufe00-\\ufe0e\\ufeff\\uffa0\\ufff9-\\ufffb\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a"
    "\\U000e0000-\\U000e0fff]"
)


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a field, variable or option of this name usually holds a secret.

    ``token`` counts only as the last word, and not in ``eos_token``, its like and ``per_token``. ``key`` and the plural
    ``tokens``, which is a count elsewhere, count only after ``hf``, ``api``, ``access`` and their like, ``pat`` and ``sas``
    after any word.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "pwd":
        return before not in ("", "old")  # PWD and OLDPWD are folders
    if words[-1] == "token":
        return _VOCABULARY.fullmatch(before) is None
    if words[-1] == "tokens" and _OWNER.fullmatch(before):
        return True
    if words[-1] in ("pat", "sas"):  # personal access token, shared access signature
        return before != ""
    if words[-1] in ("key", "keys"):
        return _OWNER.fullmatch(before) is not None
    return any(_SECRET_WORD.fullmatch(word) for word in words)


def _is_secret_argument(name: str, text: str, start: int = 0) -> bool:
    """Whether the value that an argument gives for ``name``, ``text`` from ``start`` on, is a secret: also under short names
    such as ``pw``."""
    if is_secret(name):
        return True
    words = [word.lower() for word in _WORDS.findall(name)]
    if name.lower().rpartition(".")[2].strip("-_") == "tokens":
        return _COUNT.fullmatch(text, start) is None
    if not words or name in _FOLDERS or not _SHORT_NAME.fullmatch(words[-1]):
        return False
    return not (words[-1] == "pass" and len(words) > 1 and _PASS_KIND.fullmatch(words[-2]))


def without_credentials(text: str) -> str:
    """Replace ``user:password@`` and the values of signatures and secret-like parameters in the URLs of ``text``."""
    if ":/" not in text:
        return text
    if "@" in text:
        text = _USERINFO.sub(f"{REDACTED}@", text)
        text = _NO_SPACE.sub(_clean_mistyped, text)
    return _URL_PARAMETER.sub(_clean_parameter, text) if "=" in text else text


def without_credentials_of(address: str, text: str) -> str:
    """``text`` without the credentials of its own URLs and of ``address``, which it may quote in pieces.

    Libraries report a user, a password or both apart from the address that had them.
    """
    for match in (_USERINFO.search(address), next(_mistyped_logins(address), None)):
        login = match[0].removesuffix("@") if match else ""
        password = login.partition(":")[2] or login
        for secret in (login, password, unquote(password)):
            if len(secret) >= _LEAST_SECRET:
                text = text.replace(secret, REDACTED)
    return without_credentials(text)


def has_password(text: str) -> bool:
    """Whether an address in ``text`` has a password or a secret parameter. A name alone, such as that of a container, is none."""
    logins = [*_USERINFO.finditer(text), *_mistyped_logins(text)]
    parameters = _URL_PARAMETER.finditer(text) if "://" in text else ()
    return any(":" in login[0] for login in logins) or any(_clean_parameter(each) != each[0] for each in parameters)


def _mistyped_logins(text: str) -> Iterator[re.Match[str]]:
    """The logins in the lines of ``text``, each searched up to its last ``@``: after it, every place would search to its end."""
    for line in text.split("\n"):
        yield from _MISTYPED_USERINFO.finditer(line[: line.rfind("@") + 1])


def _clean_mistyped(match: re.Match[str]) -> str:
    text, at, rest = match[0].rpartition("@")
    return _MISTYPED_USERINFO.sub(f"{REDACTED}@", text + at) + rest if at and ":/" in text else match[0]


def _clean_parameter(match: re.Match[str]) -> str:
    is_credential = is_secret(match[2]) or _SECRET_PARAMETER.fullmatch(match[2]) is not None
    return match[1] + REDACTED if is_credential else match[0]


def redact_text(text: str) -> str:
    """Replace credentials of URLs, bearer credentials and the values of secret-like assignments in ``text``."""
    text = without_credentials(text)
    if len(text) >= 23:  # shorter than any bearer credential; the usual strings skip the search
        text = _BEARER.sub(rf"\1{REDACTED}", text)
    if "=" in text or ":" in text or "--" in text:
        text = _redact_assigned(_AUTHORIZATION.sub(rf"\1{REDACTED}", text))
    return text


def _redact_assigned(text: str) -> str:
    """Redact ``name=value``, ``--name value`` and ``"name": "value"``; prose such as ``the token is`` is unchanged."""
    parts: list[str] = []
    done = end_of_prose = 0
    for match in _NAME_BEFORE_VALUE.finditer(text):
        before, name, between = match.groups()
        is_option, start = before.endswith("-"), match.end()
        if start < done or (between.isspace() and not is_option) or not is_secret(name[-_END_OF_NAME:]):
            continue
        if text.startswith(REDACTED, start):
            continue
        is_bare = between.lstrip().startswith(":")
        is_quoted = text[start] in ("'", '"')
        if is_bare and start < end_of_prose and not is_quoted:
            continue
        value = _VALUE.match(text, start)
        if value is not None and is_bare and (value[0].isdigit() or not _END_OF_VALUE.match(text, value.end())):
            end_of_prose = end_of_prose if is_quoted else value.end()  # where "token: x" inside of it would end too
        elif value is not None:
            parts += [text[done:start], REDACTED]
            done = value.end()
    return "".join([*parts, text[done:]]) if parts else text


def _redact_argument(text: str) -> str:
    """Redact one argument of a command: what follows a secret-like ``NAME=`` is its value to the end, with spaces and commas.

    ``NAME: value`` and ``--name value`` in one argument are that only where the argument, or a value in it, begins with the name.
    """
    text = without_credentials(text)
    for match in _NAME_IN_ARGUMENT.finditer(text):
        dashes, name, between = match.groups()
        name = name[-_END_OF_NAME:]
        before = text[match.start() - 1] if match.start() else ""
        if "=" not in between:
            begins = before in ("", "=", "'", '"') and dashes in ("", "-", "--") and between[0] not in ("'", '"')
            if not begins or (between.isspace() and not dashes):
                continue
        elif before in ("?", "&") and text.startswith(REDACTED, match.end()):
            continue  # of an address, whose other parameters stay
        if _is_secret_argument(name, text, match.end()):
            return redact_text(text[: match.start()]) + text[match.start() : match.end()] + REDACTED
    return redact_text(text)


def _redact_items(items: Sequence[Any], name: str) -> list[Any]:
    """Redact a list, which may be the arguments of a command: ``["--token", "abc"]``, ``["password:", "abc"]``."""
    cleaned: list[Any] = []
    option = ""
    for item in items:
        if isinstance(item, str):
            is_named = (name and is_secret(name)) or (option and _is_secret_argument(option, item))
            cleaned.append(REDACTED if item and is_named else _redact_argument(item))
            option = item.rstrip(":") if _OPTION.fullmatch(item) else ""
        else:
            cleaned.append(redact(item, option or name))
            option = ""
    return cleaned


def redact(value: Any, name: str = "") -> Any:
    """Copy nested mappings and sequences with secrets replaced; numbers, booleans and None are never secrets.

    A string in a sequence is taken for an argument of a command.

    Args:
        name: Name that the value is stored under; a string under a secret name is replaced as a whole.
    """
    if isinstance(value, str):
        return REDACTED if value and name and is_secret(name) else redact_text(value)
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return {str(key): redact(item, str(key)) for key, item in entries.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return _redact_items(cast("Sequence[Any]", value), name)
    return value


def printable(text: str, *, newlines: bool = False) -> str:
    """Show control characters and marks that reorder text as ``\\x1b`` or ``\\u202e``, so that none reaches a terminal.

    Newlines and tabs become spaces, or stay with ``newlines``.
    """
    if text.isascii() and text.isprintable():
        return text
    text = _CONTROL.sub(_escape, text)
    return text if newlines else text.replace("\n", " ").replace("\t", " ")


def shorten(text: str, limit: int = 80) -> str:
    """The first ``limit`` characters of ``text`` at most; an ellipsis marks the omission."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def quoted(name: str, limit: int = 80) -> str:
    """A name or text out of a file in quotes, for an error; of it ``limit`` characters at most."""
    return repr(shorten(name, limit))


def listed(names: Iterable[str], limit: int = 1000) -> str:
    """Names out of a file with commas, for an error: as many as have ``limit`` characters, and the number of the others."""
    shown: list[str] = []
    left = limit
    others = 0
    for name in names:
        text = shorten(name)
        left -= len(text) + 2
        if others or (left < 0 and shown):
            others += 1
        else:
            shown.append(text)
    return ", ".join(shown) + (f" and {others:,} more" if others else "")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
