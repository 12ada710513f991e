from __future__ import annotations

import pytest

from unisono.observe.sanitize import REDACTED, is_secret, printable, redact, redact_text

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
        "token",
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
        "monkey",
        "author",
        "",
        "step",
        "secretary",
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


def test_printable_removes_what_drives_a_terminal() -> None:
    wild = "a\x1b[31mb\x1b]0;title\x07c\x1b(Bd\x00e\x9bf\u202eg\rh"
    assert printable(wild) == "abcd\ufffde\ufffdf\ufffdg\ufffdh"
    assert printable("a\tb\nc") == "a b c"
    assert printable("a\tb\nc", newlines=True) == "a   b\nc"
    assert printable("grüße 漢字 ▁█") == "grüße 漢字 ▁█"
    assert printable("\ud800").isprintable()
