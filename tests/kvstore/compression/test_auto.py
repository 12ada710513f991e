"""The decision on made-up numbers, and one choice for all ranks from measured ones."""

from __future__ import annotations

import pytest
import torch
from pool import Pool

from unisono.errors import ConfigError
from unisono.kvstore.compression import auto, auto_codec
from unisono.kvstore.compression.auto import CodecChoice, CodecSpeed, choose_codec

HALF = CodecSpeed(name="bf16", ratio=2, encode_s_per_byte=0.2e-9, decode_s_per_byte=0.2e-9, summable=True)
BYTE = CodecSpeed(name="int8", ratio=4, encode_s_per_byte=1e-9, decode_s_per_byte=0.5e-9, summable=False)


@pytest.mark.parametrize(
    ("link_gb_per_s", "ranks", "chosen"),
    [
        # bf16 takes 0.4 + 0.5 L, int8 1 + n (0.5 + L / 8), none L ns for a byte
        (10.0, 2, None),
        (1.05, 2, None),  # 0.88 is not a tenth less than 0.95
        (0.9, 2, "bf16"),  # 0.96 of 1.11
        (0.1, 2, "int8"),  # 4.5 of 10; bf16 5.4
        (0.1, 4, "bf16"),  # int8 8
        (0.001, 4, "bf16"),
        (0.001, 3, "int8"),  # 377.5; bf16 500
        (0.001, 9, "bf16"),
    ],
)
def test_the_rule(link_gb_per_s: float, ranks: int, chosen: str | None) -> None:
    assert choose_codec([HALF, BYTE], 1e-9 / link_gb_per_s, ranks).codec == chosen


def test_gathered_codes_lose_from_twice_the_ratio_on() -> None:
    free = CodecSpeed(name="int8", ratio=4, encode_s_per_byte=0, decode_s_per_byte=0, summable=False)
    assert choose_codec([free], 1e-9, 7).codec == "int8"
    assert choose_codec([free], 1e-9, 8).codec is None


def test_the_reason_has_the_numbers() -> None:
    assert choose_codec([HALF, BYTE], 1e-8, 2) == CodecChoice(
        "int8", "int8: 4.83 s for a GiB of gradients with int8, 10.7 s without, over 2 workers at 0.1 GB/s"
    )
    assert choose_codec([HALF], 1e-10, 2).reason == (
        "no compression: 0.483 s for a GiB of gradients with bf16, 0.107 s without, over 2 workers at 10 GB/s"
    )
    assert choose_codec([HALF], 1e-8, 1).reason == "no compression: 1 worker, 1 codecs to choose from"


def choices(world) -> list[list[str | None]]:
    device = torch.device("cpu")
    answers = [auto_codec(world, device, candidates=["2bit"], link_bytes_per_s=link) for link in (1e3, 1e15)]
    answers.append(auto_codec(world, device))
    return [[answer.codec, answer.reason] for answer in answers]


@pytest.mark.full
def test_all_ranks_choose_alike(pool: Pool) -> None:
    first, second = pool.run(choices, ranks=2)
    assert first == second
    slow, fast, _ = first
    assert slow[0] == "2bit"
    assert slow[1].startswith("2bit: ")
    assert "at 1e-06 GB/s" in slow[1]
    assert fast[0] is None
    assert fast[1].startswith("no compression: ")


def alone(world) -> list[str | None]:
    choice = auto_codec(world, torch.device("cpu"))
    return [choice.codec, choice.reason]


def test_one_worker_has_nobody_to_send_to(pool: Pool) -> None:
    ((codec, reason),) = pool.run(alone, ranks=1)
    assert codec is None
    assert reason.startswith("no compression: 1 worker")


def with_powersgd(world) -> str:
    with pytest.raises(ConfigError) as caught:
        auto_codec(world, torch.device("cpu"), candidates=[*auto.CANDIDATES, "powersgd:2"])
    return str(caught.value)


def test_powersgd_is_not_measured(pool: Pool) -> None:
    (text,) = pool.run(with_powersgd, ranks=1)
    assert "'powersgd:2' among the codecs to choose from" in text
    assert "without auto" in text
