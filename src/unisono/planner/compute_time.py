"""The rate of matrix products that ``unisono plan calibrate`` measured on this host, by which FLOPs become seconds of compute.

A step takes longer: it also reads memory, communicates and waits. ``unisono plan auto`` predicts it.
"""

from __future__ import annotations

import socket
from typing import Final

import torch

from unisono.measure.calibration import Calibration
from unisono.measure.ceiling import device_name, matmul_key

COMPUTE_SOURCE: Final = (
    "modelled, compute only: counted FLOPs over the rate of matrix products that plan calibrate measured"
)


def measured_flops_per_s(
    known: Calibration, device: torch.device, compute: str, *, num_ranks: int, threads: int
) -> float | None:
    """FLOP/s of one of ``num_ranks`` ranks of this host; None where nothing like it was measured.

    Products in bf16 are measured while all ranks compute; those of a CPU in fp32 while one does, with the threads of a rank.
    Ranks on a CPU share its cores, so that only a measurement of as many ranks counts.

    Args:
        known: What was measured.
        device: Device of a rank.
        compute: Arithmetic of the plan, such as ``bf16``.
        num_ranks: Ranks of the job.
        threads: Threads of a rank.
    """
    if compute == "fp32" and device.type == "cpu":
        rate = known.matmul.get(matmul_key(device, torch.float32, threads=threads)[1])
    elif compute == "bf16":
        job = ((socket.gethostname(),), device_name(device))
        rates = [
            each
            for each in known.devices
            if (each.hosts, each.name) == job and (device.type != "cpu" or each.ranks == num_ranks)
        ]
        rate = max(rates, key=lambda each: each.at_s, default=None)
    else:
        rate = None
    return None if rate is None else rate.tflops * 1e12
