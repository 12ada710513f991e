"""Personal data and secret keys in text: found by their form, checked by their check digits, replaced by their kind.

Every pattern takes time in proportion to the text: parts that repeat have a limit, or stop at characters that they cannot hold.
Numbers of cards and accounts are looked for within what a pattern finds, so that digits or words beside a number do not hide it.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Final

_Span = tuple[int, int]  # where a piece of a text begins and ends
_Finder = Callable[[re.Match[str]], Iterable[_Span]]
_DIGITS: Final = re.compile("[0-9]+")
_DOUBLED: Final = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)  # the digits' sums of twice a digit
_DECIMALS: Final = re.compile(r"\.\d")
_NEAR_BEFORE: Final = re.compile(r"(?:[\d.,-]|\d )\Z")
_NEAR_AFTER: Final = re.compile(r"[ .,-]?\d")
_CARD_GROUP: Final = 4  # digits of the first group that is printed on a card, at least
_LATER_GROUP: Final = 3  # of those behind it, but for the last
_NETWORKS: Final = (  # the first four digits, from and to, and the numbers of digits (ISO/IEC 7812-1; the networks' own tables)
    (2200, 2204, range(16, 20)),  # Mir
    (2221, 2720, range(16, 17)),  # Mastercard
    (3000, 3059, range(14, 20)),  # Diners Club, also at 3095, 3600 and 3800
    (3095, 3095, range(14, 20)),
    (3400, 3499, range(15, 16)),  # American Express, also at 3700
    (3528, 3589, range(16, 20)),  # JCB
    (3600, 3699, range(14, 20)),
    (3700, 3799, range(15, 16)),
    (3800, 3999, range(14, 20)),
    (4000, 4999, range(13, 20, 3)),  # Visa
    (5000, 5099, range(12, 20)),  # Maestro, also at 5600, 6300 and 6700
    (5100, 5599, range(16, 17)),  # Mastercard
    (5600, 5899, range(12, 20)),
    (6000, 6299, range(16, 20)),  # RuPay, Discover, UnionPay
    (6300, 6399, range(12, 20)),
    (6400, 6599, range(16, 20)),  # Discover, RuPay
    (6700, 6799, range(12, 20)),
    (8100, 8299, range(16, 20)),  # UnionPay, RuPay
    (8600, 8600, range(16, 17)),  # Uzcard
    (9792, 9792, range(16, 17)),  # Troy
    (9860, 9860, range(16, 17)),  # Humo
)
_IBAN_COUNTRIES: Final = {  # by the number of characters (SWIFT's IBAN registry)
    15: "NO",
    16: "BE",
    18: "DK FI FK FO GL NL SD",
    19: "MK SI",
    20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ OM SO TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST",
    26: "IS TR",
    27: "BI DJ FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
    29: "BR EG PS QA UA",
    30: "JO KW MU YE",
    31: "MT SC",
    32: "LC",
    33: "RU",
}
_IBAN_LENGTHS: Final = {country: length for length, names in _IBAN_COUNTRIES.items() for country in names.split()}
_IBAN_VALUE: Final = {character: str(value) for value, character in enumerate("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")}

# Letters, marks and digits of scripts with spaces between words: Latin, Greek, Cyrillic, Hebrew, Arabic and others.
_ABOVE_ASCII: Final = (
    r"\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u037d\u037f-\u060b\u060d-\u061a\u0620-\u0669"
    r"\u066e-\u06d3\u06d5-\u07ff\u1e00-\u1fff"
)
_SPACED: Final = "A-Za-z0-9" + _ABOVE_ASCII
# Those of the others, in which an address may have words beside it.
_UNSPACED: Final = (
    r"\u0800-\u0963\u0966-\u1dff\u200c\u200d\u2c00-\u2dff\u3005-\u3007\u3021-\ud7ff\uf900-\ufdff\U00020000-\U0003ffff"
)
_DOMAIN: Final = (
    rf"@(?:[{_SPACED}{_UNSPACED}](?:[{_SPACED}{_UNSPACED}-]{{0,61}}[{_SPACED}{_UNSPACED}])?\.){{1,8}}"
    rf"(?:(?:xn--[A-Za-z0-9-]{{2,59}}|[A-Za-z]{{2,24}})(?![{_SPACED}_])|[{_ABOVE_ASCII}{_UNSPACED}]{{2,24}})"
)


def mask_personal_data(text: str, kinds: tuple[str, ...]) -> tuple[str, Mapping[str, int]]:
    """Replace personal data and secrets by ``<KIND>``.

    Args:
        text: The text.
        kinds: Those of ``unisono.quality.options.MASK_KINDS`` that are looked for.

    Returns:
        The new text, and how many of each kind were found.
    """
    counts: Counter[str] = Counter()
    for kind in kinds:
        pattern, (_, find_in) = _compiled(kind), _PATTERNS[kind]
        pieces: list[str] = []
        at = 0
        for begin, end in _joined(span for match in pattern.finditer(text) for span in find_in(match)):
            counts[kind] += 1
            pieces += (text[at:begin], f"<{kind.upper()}>")
            at = end
        if pieces:
            text = "".join((*pieces, text[at:]))
    return text, dict(counts)


def _joined(spans: Iterable[_Span]) -> Iterator[_Span]:
    """Spans in the order of their begin, those that overlap as one."""
    last: _Span | None = None
    for begin, end in spans:
        if last is None or begin >= last[1]:
            if last is not None:
                yield last
            last = (begin, end)
        else:
            last = (last[0], max(last[1], end))
    if last is not None:
        yield last


def _whole(match: re.Match[str]) -> Iterator[_Span]:
    yield match.span()


def _ip_address(match: re.Match[str]) -> Iterator[_Span]:
    """An address of the public internet: others identify nobody."""
    try:
        if ipaddress.ip_address(match[0]).is_global:
            yield match.span()
    except ValueError:
        return


def _card_numbers(match: re.Match[str]) -> Iterator[_Span]:
    """The numbers of cards that begin with a group of digits: those with the check digit of Luhn (ISO/IEC 7812-1).

    Groups without others beside them are one number, whatever its network. Otherwise it is some groups in a row, with the first
    digits and the length of a network, grouped as on a card.
    """
    text, begin, end = match.string, match.start(), match.end(1)
    is_alone, head = _stands_alone(text, begin, end), text[begin : begin + _CARD_GROUP]
    if not (is_alone or head.isdigit()):
        return
    groups = [(group[0], group.end()) for group in _DIGITS.finditer(text, begin, end)]
    if text[end : end + 1].isdigit():  # the last group goes on
        groups.pop()
    number = "".join(group for group, _ in groups)
    if is_alone and len(number) >= 13 and len(set(number)) > 1 and _has_check_digit(number):
        yield begin, end
        return
    lengths = _card_lengths(int(head)) if head.isdigit() else range(0)
    number = ""
    for place, (group, end) in enumerate(groups):
        number += group
        if len(number) in lengths and _has_check_digit(number) and not _DECIMALS.match(text, end):
            yield begin, end
        if place and len(group) < _LATER_GROUP:
            return


def _has_check_digit(number: str) -> bool:
    """Every second digit is doubled, from the one before the last on."""
    return sum(_DOUBLED[int(digit)] if at % 2 else int(digit) for at, digit in enumerate(reversed(number))) % 10 == 0


def _stands_alone(text: str, begin: int, end: int) -> bool:
    """Whether a run of digits has no more digits beside it, and is no part of a decimal number or of a list without blanks."""
    return not (_NEAR_BEFORE.search(text[max(begin - 2, 0) : begin]) or _NEAR_AFTER.match(text, end))


def _card_lengths(begin: int) -> range:
    """Numbers of digits of cards whose number begins with four digits."""
    return next((lengths for low, high, lengths in _NETWORKS if low <= begin <= high), range(0))


def _ibans(match: re.Match[str]) -> Iterator[_Span]:
    """An account number of the length of its country, with its check digits (ISO 13616, ISO/IEC 7064)."""
    text, begin = match.string, match.start()
    places = [place for place in range(begin, match.end(1)) if text[place] not in " -"]
    length = _IBAN_LENGTHS.get(text[begin : begin + 2], 0)
    if not 0 < length <= len(places):
        return
    end = places[length - 1] + 1
    if text[end : end + 1].isalnum():
        return
    compact = "".join(text[place] for place in places[:length])
    if int("".join(_IBAN_VALUE[character] for character in compact[4:] + compact[:4])) % 97 == 1:
        yield begin, end


_PATTERNS: Final[Mapping[str, tuple[str, _Finder]]] = {
    "secret": (
        (
            # a key in PEM or PGP, also with line ends as "\\n", and in strings of several lines. No body reaches beyond a hyphen
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:(?:\\[nrt]|[\s\"'+]){0,8}[A-Za-z-]{1,20}:[^\n\\]{0,80}(?:\n|\\[nr])){0,3}"  # headers
            r"(?:[A-Za-z0-9+/=\s\\\"'`,.]*-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
            # without its end: the lines that follow, and what is left of a line at the end of the text
            r"|[\s\\\"'`+,.]{0,16}[A-Za-z0-9+/=]{16,}(?:[\s\\\"'`+,.]{1,16}[A-Za-z0-9+/=]{16,})*"
            r"(?:[\s\\\"'`+,.]{1,16}[A-Za-z0-9+/=]{1,15}(?=\s{0,4}\Z))?)"
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
        _whole,
    ),
    "email": (
        (
            rf"(?<![{_SPACED}_.+%-])[{_SPACED}][{_SPACED}_.+%-]{{0,63}}{_DOMAIN}"
            rf"|(?<![{_UNSPACED}_.+%-])[{_UNSPACED}][{_UNSPACED}0-9_.+%-]{{0,63}}{_DOMAIN}"
        ),
        _whole,
    ),
    # another number may begin within what looks like one, so only its first character is consumed
    "iban": (r"[A-Z](?<!\w[A-Z])(?=([A-Z][0-9]{2}(?:[ -]?[0-9A-Z]){11,30}))", _ibans),
    "card": (r"[0-9](?<!\d\d)(?<!\d\.\d)(?=((?:[ -]?[0-9]){11,18}))", _card_numbers),
    "phone": (
        (
            r"(?<![\w.+-])\+[1-9][0-9]{0,2}[ .-]?(?:\([0-9]{1,4}\)[ .-]?)?[0-9]{1,4}(?:[ .-]?[0-9]{2,4}){1,4}(?![\w-])"
            r"|(?<![\w.+-])(?:\([0-9]{3}\) ?|[0-9]{3}[-.])[0-9]{3}[-.][0-9]{4}(?![\w-])"
        ),
        _whole,
    ),
    "ip": (
        r"(?<![\w.:])(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?!\w)|[0-9A-Fa-f:]{7,39}(?![\w:]))(?!\.[0-9])",
        _ip_address,
    ),
}


@cache
def _compiled(kind: str) -> re.Pattern[str]:
    """Compiled when it is first used: together they take longer than the rest of the import."""
    return re.compile(_PATTERNS[kind][0])
