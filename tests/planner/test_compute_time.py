"""Seconds of compute: which measured rate counts for a plan, and which do not."""

from __future__ import annotations

import socket

import pytest
import torch

from unisono.measure.calibration import Calibration, DeviceRate, MatmulRate
from unisono.measure.ceiling import cpu_name, matmul_key
from unisono.planner.compute_time import measured_flops_per_s

CPU = torch.device("cpu")
HERE = (socket.gethostname(),)


def device(tflops: float, ranks: int, *, hosts: tuple[str, ...] = HERE, at_s: float = 1.0) -> DeviceRate:
    return DeviceRate(
        hosts=hosts,
        name=cpu_name(),
        ranks=ranks,
        tflops=tflops,
        memory_bytes=1.0,
        memory_bytes_per_s=1.0,
        spread_frac=0.0,
        at_s=at_s,
    )


def products(tflops: float) -> MatmulRate:
    return MatmulRate(tflops=tflops, size=1.0, repeats=5.0, spread_frac=0.0)


KNOWN = Calibration(
    devices=[device(1.0, 2), device(2.0, 2, at_s=2.0), device(4.0, 1), device(8.0, 2, hosts=("elsewhere",), at_s=3.0)],
    matmul={matmul_key(CPU, torch.float32, threads=threads)[1]: products(16.0 * threads) for threads in (1, 2)},
)


@pytest.mark.parametrize(
    ("compute", "num_ranks", "threads", "tflops"),
    [
        ("bf16", 2, 1, 2.0),  # the newest of this host
        ("bf16", 1, 2, 4.0),
        ("bf16", 4, 1, None),  # four ranks would have a smaller part of the cores each
        ("fp32", 2, 1, 16.0),
        ("fp32", 1, 2, 32.0),
        ("fp32", 1, 3, None),
        ("fp16", 2, 1, None),
        ("fp8", 2, 1, None),
    ],
)
def test_the_rate_is_that_of_the_arithmetic_and_the_part_of_the_host(
    compute: str, num_ranks: int, threads: int, tflops: float | None
) -> None:
    found = measured_flops_per_s(KNOWN, CPU, compute, num_ranks=num_ranks, threads=threads)
    assert found == (None if tflops is None else tflops * 1e12)


def test_nothing_is_known_of_a_host_that_was_not_measured() -> None:
    assert measured_flops_per_s(Calibration(), CPU, "bf16", num_ranks=1, threads=1) is None
    assert measured_flops_per_s(Calibration(), CPU, "fp32", num_ranks=1, threads=1) is None
