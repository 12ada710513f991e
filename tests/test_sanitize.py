from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from unisono.cli.terminal import shown
from unisono.errors import DataError
from unisono.sanitize import (
    REDACTED,
    has_password,
    is_secret,
    printable,
    redact,
    redact_text,
    without_credentials,
    without_credentials_of,
)

CANARY = "hunter2canary"


@pytest.mark.parametrize(
    "name",
    [
        "hf_token",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "db.password",
        "apiKey",
        "authToken",
        "Authorization",
        "client-secret",
        "ssh_private_key",
        "credentials",
        "session_cookie",
        "GITHUB_TOKEN",
        "GITHUB_PAT",
        "azure_sas",
        "token",
        "PGPASSWORD",
        "mysecret",
        "account_key",
        "DB_PWD",
        "hftoken",
        "HFTOKEN",
        "hf_tokens",
        "access_tokens",
        "wandb-key",
        "WANDB_KEY",
        "GITHUB_KEY",
        "HF_KEY",
        "apikeys",
        "passphrases",
        "cookies",
    ],
)
def test_secret_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "train/tokens_total",
        "perf/tokens_per_s",
        "tokens",
        "eos_token",
        "pad_token",
        "token_id",
        "key",
        "keys",
        "metric_key",
        "tokenizer",
        "num_tokens",
        "num_experts_per_token",
        "monkey",
        "author",
        "",
        "step",
        "secretary",
        "PWD",
        "OLDPWD",
        "primary_key",
        "max_tokens",
        "eval_tokens",
        "tokens_per_step",
        "pass",
        "own/pass",
        "pat",
    ],
)
def test_innocent_names(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{CANARY}@example.org/x",
        f"clone https://{CANARY}@github.com/a/b now",
        f"WANDB_API_KEY={CANARY} python train.py",
        f"train --hf-token {CANARY} --steps 5",
        f"train --hf-token={CANARY}",
        f"{{'api_key': '{CANARY}', 'x': 1}}",
        f'{{"password": "{CANARY}"}}',
        f"Authorization: Bearer {CANARY}{CANARY}",
        f"curl -H 'authorization: basic {CANARY}{CANARY}'",
        f"a=1&access_key={CANARY}&b=2",
        f"password: {CANARY}",
        f"{{password: {CANARY}, user: me}}",
        f"Authorization: Basic {CANARY[:8]}",
        f"authorization: token {CANARY}",
        f"user: me\n  api_key: {CANARY}\n",
        f"PGPASSWORD={CANARY} psql",
    ],
)
def test_secrets_inside_text(text: str) -> None:
    cleaned = redact_text(text)
    assert CANARY not in cleaned
    assert REDACTED in cleaned


@pytest.mark.parametrize(
    "text",
    [
        "the next token is the",
        "loss=3.2 lr=0.1 eos_token=<|end|>",
        "a basic training loop",
        "def f(token): return token",
        "https://example.org/a?b=c",
        "password",
        "see http://localhost:6006/ for tokens: 12",
        "/run/secret: not readable",
        "next_token: 17",
        "Unable to locate credentials: see the manual",
    ],
)
def test_plain_text_is_left_alone(text: str) -> None:
    assert redact_text(text) == text


def test_redact_walks_mappings_and_argument_lists() -> None:
    given = {
        "argv": ["train", "--token", CANARY, "--steps", "5"],
        "env": {"HF_TOKEN": CANARY, "OMP_NUM_THREADS": "2"},
        "secret": ["a", CANARY],
        "password": 7,
        "nested": [{"api_key": CANARY}, (1, 2)],
    }
    cleaned = redact(given)
    assert CANARY not in str(cleaned)
    assert cleaned["argv"] == ["train", "--token", REDACTED, "--steps", "5"]
    assert cleaned["env"]["OMP_NUM_THREADS"] == "2"
    assert cleaned["secret"] == [REDACTED, REDACTED]
    assert cleaned["password"] == 7  # numbers are counts and settings, not secrets
    assert cleaned["nested"][1] == [1, 2]


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "HF_TOKEN",
        "access_token",
        "pwd",
        "db.pw",
        "pass",
        "DB_PASS",
        "auth",
        "tokens",
        "hftoken",
        "api_keys",
        "pws",
    ],
)
@pytest.mark.parametrize(
    "value", ["A", "A,{}", "A {}", "A;{}", "A&{}", "A){}", "A]{}", "A}}{}", "'A' {}", "[redacted]{}"]
)
def test_the_value_in_an_argument_is_all_that_follows(name: str, value: str) -> None:
    value = value.format(CANARY)
    for given, kept in (
        (f"--{name}={value}", f"--{name}={REDACTED}"),
        (f"--{name} {value}", f"--{name} {REDACTED}"),
        (f"{name}={value}", f"{name}={REDACTED}"),
        (f"{name} = {value}", f"{name} = {REDACTED}"),
        (f"{name}: {value}", f"{name}: {REDACTED}"),
        (f"--set=data.{name}={value}", f"--set=data.{name}={REDACTED}"),
        (f"--header=X-{name}: {value}", f"--header=X-{name}: {REDACTED}"),
    ):
        if "X-tokens" in given:
            continue  # of X: a count
        assert redact({"command": ["train", given, "--steps=5"]}) == {"command": ["train", kept, "--steps=5"]}
    for option in (f"--{name}", f"{name}:"):
        assert redact(["train", option, value, "5"]) == ["train", option, REDACTED, "5"]


def test_authorization_in_arguments_and_text() -> None:
    for text in ("Authorization: Bearer X", f"Authorization: Bearer {CANARY}{CANARY}", "Authorization: Basic X"):
        assert redact_text(text) == f"Authorization: {REDACTED}"
        assert redact(["-H", text]) == ["-H", f"Authorization: {REDACTED}"]
    assert redact([f"-HAuthorization: Bearer {CANARY}"]) == [f"-HAuthorization: {REDACTED}"]


@pytest.mark.parametrize(
    "argument",
    [
        *(
            f"--{name}=a,b c"
            for name in (
                "author",
                "passes",
                "bypass",
                "authority",
                "pass_through",
                "tokenizer",
                "forward_pass",
                "compass",
            )
        ),
        *(f"--{name}=12" for name in ("num_tokens", "max_tokens", "tokens_per_step", "tokens", "train.tokens")),
        "--tokens=2e9",
        "--tokens=10B",
        "--eos_token=<|end|>,x",
        "PWD=/home/me/a b",
        "loader.cache=a;b",
        "https://host/a?b=1&c=2",
        "password",
        "the token is here",
    ],
)
def test_ordinary_arguments_stay(argument: str) -> None:
    name, _, value = argument.partition("=")
    assert redact([argument, "x"]) == [argument, "x"]
    if name.startswith("--"):
        assert redact([name, value]) == [name, value]


def test_an_address_in_an_argument_keeps_its_other_parameters() -> None:
    assert redact([f"--from=https://h/a?token={CANARY}&v=1"]) == [f"--from=https://h/a?token={REDACTED}&v=1"]


@pytest.mark.parametrize("piece", ["token ", "a=", "a: ", "-", "token = ", "a" + " " * 50, "'a':", "pass-", "b "])
@pytest.mark.parametrize("end", ["", "=", " x"])
def test_a_long_hostile_argument_ends_soon(piece: str, end: str) -> None:
    assert redact([piece * 50_000 + end, " " * 100_000 + end, "a" + " " * 100_000 + end])


def test_printable_shows_what_would_drive_a_terminal() -> None:
    wild = "a\x1b[31mb\x1b]0;title\x07c\x00d\x9be\u202ef\rg\x7f\u2066\u061c"
    assert printable(wild) == r"a\x1b[31mb\x1b]0;title\x07c\x00d\x9be\u202ef\x0dg\x7f\u2066\u061c"
    assert printable("a\tb\nc") == "a b c"
    assert printable("a\tb\nc", newlines=True) == "a\tb\nc"
    assert printable("grüße 漢字 ▁█") == "grüße 漢字 ▁█"
    assert printable("a\xadb\u034fc\u3164\U000e0041") == r"a\xadb\u034fc\u3164\U000e0041"
    assert printable("❤\ufe0f") == "❤\ufe0f"
    assert printable("\ud800\udcff") == r"\ud800\udcff"  # of a file name that is not UTF-8
    assert printable("\u0645\u06cc\u200c\u062e 👩\u200d💻") == "\u0645\u06cc\u200c\u062e 👩\u200d💻"


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
def test_no_control_character_passes(code: int) -> None:
    kept = {0x0A, 0x09}
    assert (chr(code) in printable(f"a{chr(code)}b", newlines=True)) == (code in kept)
    assert chr(code) not in printable(f"a{chr(code)}b")


@pytest.mark.parametrize(
    "url",
    [
        f"ftp://user:{CANARY}@host:21/a/b?c#d",
        f"ftp://{CANARY}@host/a",
        f"ftp://user:pass/{CANARY}@host/a",
        f"ftp://user:pass#{CANARY}?x@host/a",
        f"ftp://user:pass@{CANARY}@host/a",
        f"simplecache::zip://a.rec::ftp://user:{CANARY}@host/a.zip",
        f"https://host/a?sv=1&sig={CANARY}&x=1",
        f"https://host/a?X-Amz-Signature={CANARY}",
        # as a path has it
        f"http:/user:{CANARY}@host:9/a.rec",
        f"s3:/{CANARY}@host/a",
        f"https://host/a?X-Amz-Credential={CANARY}&X-Amz-Security-Token={CANARY}",
        f"https://host/a?access_token={CANARY}",
        *(f"https://host/a?b=1&{name}={CANARY}" for name in ("pwd", "pass", "key", "account_key")),
        f"https://user:{'x' * 5000}{CANARY}@host/a",
        f"ftp://user:{'x' * 5000}/{CANARY}@host/a",
        f"ftp://user:o'{CANARY}@host/a",
        f'["ftp://user:{CANARY}@host/a", "ftp://user:{CANARY}@host/b"]',
    ],
)
def test_addresses_without_credentials(url: str) -> None:
    cleaned = without_credentials(f"given {url!r}: not found")
    assert CANARY not in cleaned
    assert "host" in cleaned
    assert without_credentials(cleaned) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:6006/a@b",
        "http://[::1]:8080/a@b",
        "s3://bucket/a:b@c",
        "s3:/bucket/a:b@c",
        "file:/home/me@work/a",
        "http:/localhost:6006/a@b",
        "file:///home/me@work/a",
        "('http://host:80', 'a@b')",
        "zip://*.csv::/data/a@b.zip",
        "https://host/a?page=1&seed=2",
        "user@host: no address",
    ],
)
def test_addresses_that_have_none_stay(text: str) -> None:
    assert without_credentials(text) == text


@pytest.mark.parametrize("piece", ["://", "://a:b", "a:/b:c", "://a:b'", "://a:b@", "xx:/u:p/"])
@pytest.mark.parametrize("end", ["", "@", "'@", " @"])
def test_a_long_hostile_text_ends_soon(piece: str, end: str) -> None:
    """Half a second each; a search of quadratic time would run for an hour, which the time-out of the tests ends."""
    text = piece * 100_000 + end
    assert redact_text(text) == text or REDACTED in redact_text(text)


def cpu_time(function: Callable[[str], object], text: str) -> float:
    taken = []
    for _ in range(3):
        begin = time.process_time()
        function(text)
        taken.append(time.process_time() - begin)
    return min(taken)


@pytest.mark.parametrize(
    "function", [redact_text, lambda text: redact([text]), has_password, lambda text: without_credentials_of(text, "")]
)
@pytest.mark.parametrize("end", [" x", "=x", "\n@"])
def test_hostile_text_costs_about_as_much_as_plain_text(function: Callable[[str], object], end: str) -> None:
    """Of the same length, as a ratio: a search from each word of a name, or of an address, cost 30 to 300 times as much."""
    plain = cpu_time(redact_text, ("step=5 loss=2.5 of run a-b, " * 500)[:10_000])
    pieces = [
        "a-", "a.", "a_", "--a", "a:", "a=", "://", "@", "'", '"', "[", "]", "-", ".", "&a=", "token:",
        "token:1", "_token:", "tokens=", "xx:/a:", 'token:"', "://a:b", "a ", " ", "token ", "authorization: ", "bearer ",
    ]  # fmt: skip
    for piece in pieces:
        text = (piece * 10_000)[:10_000] + end
        assert cpu_time(function, text) < 20 * plain, repr(piece)


def test_a_name_of_any_length_and_first_character() -> None:
    for name in ("a-" * 500 + "token", "A" * 500 + "_TOKEN", "_authToken", "étoken", "2fa_secret"):
        assert redact_text(f"x {name}={CANARY} y") == f"x {name}={REDACTED} y"
        assert redact([f"--set={name}={CANARY}"]) == [f"--set={name}={REDACTED}"]
    assert redact_text("loss=2: a 1-token window") == "loss=2: a 1-token window"


def test_marks_that_hide_text_are_shown_wherever_text_is() -> None:
    wild = "a\u3164b\U000e0101c\u115f"
    shown_as = r"a\u3164b\U000e0101c\u115f"
    assert shown(wild) == shown_as
    assert DataError(given=wild, rule="r", consequence="c", nearest="n").problems[0].given == shown_as


def test_which_addresses_have_a_password() -> None:
    for text in ("ftp://me:p@host", "https://h/?sig=x", "x ftp://me:p/w@host y"):
        assert has_password(text), text
    for text in (
        "abfss://container@account/x",
        "hdfs://user@nn:8020/x",
        "http://host:80/a@b",
        "/bin:/sw@1/bin",
        "a:b@c",
    ):
        assert not has_password(text), text


def test_a_problem_quotes_neither_credentials_nor_terminal_sequences() -> None:
    part = f"ftp://user:{CANARY}@host/\x1b[2J\u202e\n\tline"
    error = DataError(given=part, rule=part, consequence=part, nearest=part)
    assert str(error).count(r"ftp://[redacted]@host/\x1b[2J\u202e") == 4
    assert CANARY not in repr(error) + "".join(error._render_traceback_())
    assert error.problems[0].given == "ftp://[redacted]@host/\\x1b[2J\\u202e  line"  # a forged line stays on this one


def test_what_a_library_says_of_an_address_in_pieces() -> None:
    address = f"ftp://someone:{CANARY}%2F@host/a"
    told = f"login someone:{CANARY}%2F failed: user 'me', password {CANARY}/ at {address}"
    assert without_credentials_of(address, told) == (
        "login [redacted] failed: user 'me', password [redacted] at ftp://[redacted]@host/a"
    )
    assert without_credentials_of("ftp://a:b@host", "a library and b") == "a library and b"
