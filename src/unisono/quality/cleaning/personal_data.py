"""Personal data and secret keys in text: found by their form, checked by their check digits, replaced by their kind.

Every pattern takes time in proportion to the text: parts that repeat have a limit, or stop at characters that they cannot hold.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

_IBAN_VALUE: Final = {character: str(value) for value, character in enumerate("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")}


def mask_personal_data(text: str, kinds: tuple[str, ...]) -> tuple[str, Mapping[str, int]]:
    """Replace personal data and secrets by ``<KIND>``.

    Args:
        text: The text.
        kinds: Those of ``unisono.quality.options.MASKED`` that are looked for.

    Returns:
        The new text, and how many of each kind were found.
    """
    counts: Counter[str] = Counter()
    for kind in kinds:
        pattern, is_one = _PATTERNS[kind]

        def replacement(match: re.Match[str], kind: str = kind, is_one: Callable[[str], bool] = is_one) -> str:
            if not is_one(match[0]):
                return match[0]
            counts[kind] += 1
            return f"<{kind.upper()}>"

        text = pattern.sub(replacement, text)
    return text, dict(counts)


def _always(_: str) -> bool:
    return True


def _is_ip_address(text: str) -> bool:
    """Whether it is an address of the public internet: others identify nobody."""
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_card_number(text: str) -> bool:
    """By the check digit of Luhn (ISO/IEC 7812-1)."""
    digits = [int(character) for character in text if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and (sum(digits[::-2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    """By its check digits (ISO 13616, ISO/IEC 7064)."""
    compact = text.replace(" ", "")
    number = "".join(_IBAN_VALUE[character] for character in compact[4:] + compact[:4])
    return 15 <= len(compact) <= 34 and int(number) % 97 == 1


_PATTERNS: Final[Mapping[str, tuple[re.Pattern[str], Callable[[str], bool]]]] = {
    "secret": (
        re.compile(
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:\s{0,4}[A-Za-z-]{1,20}:[^\n]{0,80}\n){0,3}[A-Za-z0-9+/=\s]{0,20000}"
            r"-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"|(?<=://)[^\s/:@]{1,64}:[^\s/@]{1,128}(?=@)"  # user and password of an address
            r"|\b(?i:aws_secret_access_key|aws_secret_key)[\"']?\s{0,4}[=:]\s{0,4}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
            r"|\bnpm_[A-Za-z0-9]{36}\b|\bSG\.[\w-]{22}\.[\w-]{43}(?![\w-])"
            r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # Amazon Web Services
            r"|\bgh[pousr]_[A-Za-z0-9]{36,255}\b|\bgithub_pat_[A-Za-z0-9_]{22,255}\b"
            r"|\bglpat-[A-Za-z0-9_-]{20,64}\b"
            r"|(?<![\w-])xox[abeoprs]-[A-Za-z0-9-]{10,250}\b"  # Slack
            r"|(?<![\w-])sk-(?:ant-|proj-)?[A-Za-z0-9_-]{20,250}\b"
            r"|\bhf_[A-Za-z0-9]{30,64}\b"
            r"|\bAIza[0-9A-Za-z_-]{35}\b"  # Google
            r"|\b[sr]k_live_[0-9a-zA-Z]{20,250}\b"  # Stripe
            r"|(?<![\w-])eyJ[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{10,2000}"  # JSON Web Token
        ),
        _always,
    ),
    "email": (
        re.compile(
            r"(?<![\w.+%-])[A-Za-z0-9][\w.+%-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}\b"
        ),
        _always,
    ),
    "iban": (re.compile(r"\b[A-Z]{2}[0-9]{2}(?: ?[0-9A-Z]{4}){2,7}(?: ?[0-9A-Z]{1,3})?\b"), _is_iban),
    "card": (re.compile(r"(?<![\d.,-])[0-9](?:[ -]?[0-9]){12,18}(?![\d.,-]?[0-9])"), _is_card_number),
    "phone": (
        re.compile(
            r"(?<![\w.+-])\+[1-9][0-9]{0,2}[ .-]?(?:\([0-9]{1,4}\)[ .-]?)?[0-9]{1,4}(?:[ .-]?[0-9]{2,4}){1,4}(?![\w-])"
            r"|(?<![\w.+-])(?:\([0-9]{3}\) ?|[0-9]{3}[-.])[0-9]{3}[-.][0-9]{4}(?![\w-])"
        ),
        _always,
    ),
    "ip": (
        re.compile(r"(?<![\w.:])(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?!\w)|[0-9A-Fa-f:]{7,39}(?![\w:]))(?!\.[0-9])"),
        _is_ip_address,
    ),
}
