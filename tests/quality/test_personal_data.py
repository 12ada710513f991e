"""Personal data and secrets: found by form and check digit, left alone otherwise, in time in proportion to the text."""

from __future__ import annotations

import pytest

from unisono.quality.cleaning.personal_data import mask_personal_data
from unisono.quality.options import MASKED


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("email", "write to jane.doe+x@mail.example.org, please", "write to <EMAIL>, please"),
        ("email", "a@b and @name and x@localhost", None),
        ("ip", "from 8.8.8.8 and 2001:4860:4860::8888.", "from <IP> and <IP>."),
        ("ip", "at 192.168.0.1, 127.0.0.1, 10.0.0.1, 1.2.3.4.5 and 12:30:45", None),
        ("card", "4111 1111 1111 1111 and 5500-0000-0000-0004", "<CARD> and <CARD>"),
        ("card", "4111 1111 1111 1112 and 0000000000000000 and 3.1415926535897932", None),
        ("iban", "DE89 3704 0044 0532 0130 00, GB82WEST12345698765432", "<IBAN>, <IBAN>"),
        ("iban", "DE89 3704 0044 0532 0130 01", None),
        ("phone", "call +49 30 901820 or (555) 123-4567 or 555-123-4567", "call <PHONE> or <PHONE> or <PHONE>"),
        ("phone", "in 1999-2004, 10.5 + 3 of 12345678, version 1.2.3", None),
        ("secret", "AKIAIOSFODNN7EXAMPLE", "<SECRET>"),
        ("secret", "token ghp_" + "a1B2" * 9 + ".", "token <SECRET>."),
        ("secret", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.c2lnbmF0dXJlLW9m", "<SECRET>"),
        (
            "secret",
            "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nMIIEpAIBAAKC+/=\nabc\n-----END RSA PRIVATE KEY-----",
            "<SECRET>",
        ),
        ("ip", "ask 8.8.8.8:53, not 8.8.8.8a", "ask <IP>:53, not 8.8.8.8a"),
        (
            "secret",
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: x\n\nlQ/=\n-----END PGP PRIVATE KEY BLOCK-----",
            "<SECRET>",
        ),
        ("secret", "clone https://me:s3cret@example.org/x", "clone https://<SECRET>@example.org/x"),
        ("secret", "aws_secret_access_key = " + "aB3/" * 10 + "\n", "<SECRET>\n"),
        ("secret", "npm_" + "a1B2" * 9 + " and SG." + "a" * 22 + "." + "b" * 43, "<SECRET> and <SECRET>"),
        ("secret", "see https://example.org:8080/a@b and npm_install", None),
        ("secret", "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE----- and ghp_short", None),
    ],
)
def test_kinds(kind: str, text: str, expected: str | None) -> None:
    masked, counts = mask_personal_data(text, (kind,))
    assert masked == (text if expected is None else expected)
    assert counts == ({} if expected is None else {kind: expected.count(f"<{kind.upper()}>")})


def test_all_kinds_at_once() -> None:
    text = "me@example.org, 8.8.8.8, 4111111111111111"
    assert mask_personal_data(text, MASKED) == ("<EMAIL>, <IP>, <CARD>", {"email": 1, "card": 1, "ip": 1})
    assert mask_personal_data(text, ()) == (text, {})


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "a",
            "a.",
            "@",
            "a@",
            "a@a.",
            "1",
            "1 ",
            "1-",
            "+1",
            "+1 ",
            ":",
            "a:",
            "1.",
            "eyJ",
            "-eyJ-",
            "eyJ.",
            "sk-",
            "xoxb-",
        ),
        *("-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "AKIA", "DE12 ", "AB12", "(1", "%a", "a+", "BEGIN A: b\n"),
    ],
)
def test_text_made_to_take_long(unit: str) -> None:
    """Quadratic time would be some 10^10 steps here: the test would not end."""
    text = unit * (200_000 // len(unit))
    masked, _ = mask_personal_data(text, MASKED)
    assert len(masked) <= len(text)
