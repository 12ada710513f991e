"""Small training states with every dtype and awkward shape, and the shortest way to save them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.checkpoint import Checkpointer, CheckpointOptions
from unisono.dist import JobSpec, World

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bit pattern the dtype can hold, NaNs and denormals among them."""
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    size = torch.empty(shape, dtype=dtype).nbytes
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def mixed_state(seed: int = 0, rows: int = 37) -> dict[str, Tensor]:
    """Every dtype, and the shapes that break things: no dims, no elements, one row, not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    state = {f"every/{str(d).removeprefix('torch.')}": random_bits((rows, 5), d, generator) for d in DTYPES}
    state["scalar"] = random_bits((), torch.float32, generator)
    state["step"] = torch.tensor(seed + 7)
    state["empty"] = torch.empty(0, 4)
    state["no_columns"] = torch.empty(3, 0, dtype=torch.bfloat16)
    state["transposed"] = random_bits((6, rows), torch.float32, generator).t()
    state["strided"] = random_bits((rows, 8), torch.int16, generator)[:, ::2]
    state["conjugate"] = torch.randn(rows, dtype=torch.complex64, generator=generator).conj()
    return state


def large_state(seed: int = 0, mib: int = 12) -> dict[str, Tensor]:
    """Contiguous float32 tensors of several blocks, one of them large enough to be cut between ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = mib * 2**20 // 4 // 512 // 2
    return {
        "model/big": torch.randn(rows, 512, generator=generator),
        "model/small": torch.randn(129, generator=generator),
        "optim/big": torch.randn(rows // 2, 512, generator=generator),
        "optim/rest": torch.randn(rows // 2, 512, generator=generator),
    }


def bits(tensor: Tensor) -> bytes:
    """Dtype, shape and exact bytes of a tensor, to compare."""
    plain = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return f"{tensor.dtype} {list(tensor.shape)} ".encode() + plain.view(torch.uint8).numpy().tobytes()


def all_bits(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in state.items()}


class Log:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def lone() -> World:
    """A job of one process."""
    return World(JobSpec())


def make(
    root: Path,
    *,
    world: World | None = None,
    emit: Callable[..., None] | None = None,
    fault: Callable[[str], None] | None = None,
    attempt: int = 1,
    worker: int | None = None,
    **options: Any,
) -> Checkpointer:
    return Checkpointer(
        root,
        world=world or lone(),
        options=CheckpointOptions(**options),
        attempt=attempt,
        worker=worker,
        emit=emit or Log(),
        fault=fault,
    )


def save_steps(root: Path, *steps: int, state: dict[str, Tensor] | None = None, **options: Any) -> None:
    """Commit the given steps, one after the other, by one process; the state differs from step to step."""
    checkpointer = make(root, **({"keep_last": 100} | options))
    for step in steps:
        checkpointer.save(step, state if state is not None else mixed_state(step), {}, {"step": step})
        checkpointer.wait()
    checkpointer.close()
    assert checkpointer.committed_step == steps[-1]
