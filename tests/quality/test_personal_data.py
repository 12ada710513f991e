"""Personal data and secrets: found by form and check digit, left alone otherwise, in time in proportion to the text."""

from __future__ import annotations

import pytest

from unisono.quality.cleaning.personal_data import mask_personal_data
from unisono.quality.options import MASK_KINDS

BEGIN, END = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"
KEY = "MIIEpAIBAAKCAQEA+/vZ" * 3


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("email", "write to jane.doe+x@mail.example.org, please", "write to <EMAIL>, please"),
        ("email", "a@b and @name and x@localhost", None),
        ("email", "jörg@müller.de, Jörg.Ängström+x@web.de; jo\u0308rg@web.de", "<EMAIL>, <EMAIL>; <EMAIL>"),
        ("email", "почта@пример.рф и info@xn--e1afmkfd.xn--p1ai.", "<EMAIL> и <EMAIL>."),
        ("email", "संपर्क@डाटामेल.भारत। और δοκιμή@παράδειγμα.ελ", "<EMAIL>। और <EMAIL>"),
        ("email", "请写信给zhang@example.com或者 张三@例子.中国。", "请写信给<EMAIL>或者 <EMAIL>。"),
        ("email", "kim@example.com으로, nguyễn@example.vn", "<EMAIL>으로, <EMAIL>"),
        ("email", "3个@5元, ä@b, @müller.de, größe@5.50, привет @вася. Как, 价格@每斤。三元, a@b.c", None),
        ("ip", "from 8.8.8.8 and 2001:4860:4860::8888.", "from <IP> and <IP>."),
        ("ip", "at 192.168.0.1, 127.0.0.1, 10.0.0.1, 1.2.3.4.5 and 12:30:45", None),
        ("card", "4111 1111 1111 1111 and 5500-0000-0000-0004", "<CARD> and <CARD>"),
        ("card", "4111 1111 1111 1112 and 0000000000000000 and 3.1415926535897932", None),
        ("iban", "DE89 3704 0044 0532 0130 00, GB82WEST12345698765432", "<IBAN>, <IBAN>"),
        ("iban", "DE89 3704 0044 0532 0130 01", None),
        ("card", "4111 1111 1111 1111 12/26", "<CARD> 12/26"),
        ("card", "4111-1111-1111-1111 12-26", "<CARD> 12-26"),
        ("card", "4111 1111 1111 1111 126", "<CARD> 126"),
        ("card", "2 4111 1111 1111 1111", "2 <CARD>"),
        ("card", "1 4111 1111 1111 1111 2 5500 0000 0000 0004", "1 <CARD> 2 <CARD>"),
        ("card", "4111111111111111\n5500 0000 0000 0004", "<CARD>\n<CARD>"),
        ("card", "paid (4111 1111 1111 1111), (5500000000000004)", "paid (<CARD>), (<CARD>)"),
        ("card", "4111 1111 1111 1111 5500 0000 0000 0004", "<CARD> <CARD>"),
        ("card", "4111111111111111,5500000000000004;378282246310005", "<CARD>,<CARD>;<CARD>"),
        ("card", "no.4111111111111111-12/26, visa-4111-1111-1111-1111.", "no.<CARD>-12/26, visa-<CARD>."),
        ("card", "12 3782 822463 10005 7 3056 930902 5904 7", "12 <CARD> 7 <CARD> 7"),
        ("card", "7 4222 222 222 222 and 7 6759649826438453 and 7 501800000009", "7 <CARD> and 7 <CARD> and 7 <CARD>"),
        ("card", "7 2223003122003222 7 3530111333300000 7 6011 1111 1111 1117", "7 <CARD> 7 <CARD> 7 <CARD>"),
        # with check digits, but no network's number, length or groups
        ("card", "7 9111 1111 1111 1110 and 7 411 1111 1111 1111 1 and 4111111111111111.5", None),
        ("card", "1 2 3 4 5 6 7 8 9 4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 and 411111111111111100000", None),
        ("iban", "AT61 1904 3002 3457 3201 BIC: OPSKATWW", "<IBAN> BIC: OPSKATWW"),
        ("iban", "BE68 5390 0754 7034 BIC X, BE68539007547034 EUR 20", "<IBAN> BIC X, <IBAN> EUR 20"),
        ("iban", "ES91 2100 0418 4502 0005 1332 FOR A", "<IBAN> FOR A"),
        ("iban", "PL61 1090 1014 0000 0712 1981 2874 USD", "<IBAN> USD"),
        ("iban", "IBAN:NO93 8601 1117 947\n(NL91ABNA0417164300)", "IBAN:<IBAN>\n(<IBAN>)"),
        ("iban", "DE89-3704-0044-0532-0130-00 12", "<IBAN> 12"),
        ("iban", "AT61 1904 3002 3457 3201 DE89 3704 0044 0532 0130 00", "<IBAN> <IBAN>"),
        ("iban", "AB12 GB29 NWBK 6016 1331 9268 19 FR14 2004 1010 0505 0001 3M02 606", "AB12 <IBAN> <IBAN>"),
        ("iban", "AT61 1904 3002 3457 3201BIC and XAT611904300234573201 and ZZ61 1904 3002 3457 3201", None),
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
        (
            "secret",
            rf'{{"private_key": "{BEGIN}\n{KEY}\n{KEY}=\n{END}\n", "id": 1}}',
            r'{"private_key": "<SECRET>\n", "id": 1}',
        ),
        ("secret", rf"KEY='{BEGIN}\r\nProc-Type: 4,ENCRYPTED\r\n\r\n{KEY}\r\n{END}'", "KEY='<SECRET>'"),
        ("secret", f'k = "{BEGIN}\\n" +\n    "{KEY}\\n" +\n    "{KEY}\\n" + "{END}";', 'k = "<SECRET>";'),
        ("secret", f"k = (\n '{BEGIN}\\n'\n '{KEY}\\n'\n '{END}')", "k = (\n '<SECRET>')"),
        ("secret", f"a\n{BEGIN}\n{KEY}\n{KEY}\nMIIE=\n", "a\n<SECRET>\n"),
        ("secret", f"{BEGIN}\nDEK-Info: x\n\n{KEY}\n{KEY}\n\nThe rest is text.", "<SECRET>\n\nThe rest is text."),
        ("secret", f"{BEGIN}\n" + f"{KEY}\n" * 1_000 + f"{END} x", "<SECRET> x"),
        ("secret", f"a key begins with {BEGIN} and ends with a line of its own", None),
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
    assert mask_personal_data(text, MASK_KINDS) == ("<EMAIL>, <IP>, <CARD>", {"email": 1, "card": 1, "ip": 1})
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
            "4111 ",
            "4111 1111 1111 ",
            "AT61 1904 ",
            "AT61",
            "eyJ.",
            "sk-",
            "xoxb-",
        ),
        *("-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "AKIA", "DE12 ", "AB12", "(1", "%a", "a+", "BEGIN A: b\n"),
        *(
            "ä@",
            "中",
            "中@",
            "中@中.",
            "ä@ä.",
            "xn--",
            "@xn--a.",
            "+",
            f"{BEGIN}a: ",
            f"{BEGIN}\nA: b\n" + "a" * 9,
            f"{BEGIN}\n{KEY}\n",
        ),
        *(f"{BEGIN}" + "\n+" * 5_000, f"{BEGIN}" + f"{KEY} " * 800, "-----BEGIN PRIVATE KEY-----a:\\n"),
    ],
)
def test_text_made_to_take_long(unit: str) -> None:
    """Quadratic time would be some 10^10 steps here: the test would not end."""
    text = unit * (200_000 // len(unit))
    masked, _ = mask_personal_data(text, MASK_KINDS)
    assert len(masked) <= len(text)
