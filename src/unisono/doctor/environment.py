"""Environment variables that make a run slow, or do nothing. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from unisono.doctor.check import Check, judged
from unisono.doctor.nccl_variables import misspelt
from unisono.launch.resources import allowed_cores

# variable → (values that slow down or are for debugging; empty: any but 0), what it does
_LEFTOVERS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "CUDA_LAUNCH_BLOCKING": ((), "every kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": (("INFO", "DETAIL"), "every collective is checked against the other ranks"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ((), "every tensor is allocated by the driver"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "NCCL writes long logs"),
    "NCCL_P2P_DISABLE": ((), "devices exchange through host memory, not over NVLink or PCIe"),
    "NCCL_SHM_DISABLE": ((), "ranks of one host exchange over the network"),
    "NCCL_IB_DISABLE": ((), "InfiniBand and RoCE are not used"),
    "NCCL_ALGO": ((), "NCCL does not choose the algorithm by size"),
    "NCCL_PROTO": ((), "NCCL does not choose the protocol by size"),
    "TORCH_LOGS": ((), "the compiler writes long logs"),
}
# variables that were renamed or removed → what is read instead; empty: nothing (the pages on environment variables of NCCL's
# user guide, and torch's release notes)
_REPLACED: Final[Mapping[str, str]] = {
    "NCCL_RINGS": "",
    "NCCL_MIN_NRINGS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NRINGS": "NCCL_MAX_CTAS",
    "NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS",
    "NCCL_LL_THRESHOLD": "NCCL_PROTO",
    "NCCL_TREE_THRESHOLD": "NCCL_ALGO",
    "NCCL_SINGLE_RING_THRESHOLD": "",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_CHECKS_DISABLE": "NCCL_CHECK_MODE",
    "NCCL_CHECK_POINTERS": "NCCL_CHECK_MODE=DEBUG_LOCAL",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
}
_MAX_DIGITS: Final = 9  # of a number of threads; Python refuses to read one of some thousands
_THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def check_environment(environ: Mapping[str, str]) -> Iterator[Check]:
    """ENV01 to ENV04."""
    leftovers = [
        f"{name}={environ[name]}: {what}"
        for name, (values, what) in _LEFTOVERS.items()
        if _is_set(environ, name, values)
    ]
    yield judged(
        "ENV01",
        "variables for debugging",
        "; ".join(leftovers) or "none is set",
        warning=f"unset {' '.join(text.partition('=')[0] for text in leftovers)}" if leftovers else "",
    )
    old = {name: new for name, new in _REPLACED.items() if name in environ}
    yield judged(
        "ENV02",
        "variables that were renamed or removed",
        "; ".join(f"{name}={environ[name]}" for name in old) or "none is set",
        warning="; ".join(f"{new} instead of {name}" if new else f"unset {name}" for name, new in old.items()),
    )
    yield _threads(environ)
    wrong = {name: right for name in environ if name not in _REPLACED and (right := misspelt(name))}
    yield judged(
        "ENV04",
        "names that NCCL does not read",
        "; ".join(f"{name}={environ[name]}" for name in wrong) or "none is misspelt",
        warning="; ".join(f"{right} instead of {name}" for name, right in wrong.items()),
    )


def _is_set(environ: Mapping[str, str], name: str, values: tuple[str, ...]) -> bool:
    value = environ.get(name, "")
    return value.upper() in values if values else value not in ("", "0")


def _threads(environ: Mapping[str, str]) -> Check:
    set_to = {name: environ[name] for name in _THREADS if name in environ}
    cores, cure = len(allowed_cores()), ""
    for name, given in set_to.items():
        value = given.lstrip("0") or "0"
        if not value.isdecimal() or value == "0":
            cure = f"{name} is a number of threads, at least 1: unset it, and the launcher divides the cores"
        elif len(value) > _MAX_DIGITS or int(value) > cores:
            cure = f"{name} is more than the {cores} cores: unset it, and the launcher divides the cores"
    evidence = (
        ", ".join(f"{name}={value}" for name, value in set_to.items()) or "not set: the launcher divides the cores"
    )
    return judged("ENV03", "threads", evidence, warning=cure)
