"""Error feedback: the part of a gradient that a code omits is added to the next one (Karimireddy et al. 2019,
arXiv:1901.09847).

p = gradient + residual; send C(p); residual = p - D(C(p)). A skipped step must leave no trace, and whether a step is
skipped is known only on the device, after all workers have sent. A step therefore proposes new residuals, and
``commit`` accepts or drops them. Residuals are training state of one worker: without them a resumed run differs from
the one that was stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.kvstore.compression.codec import Codec, accumulation_dtype


class CommittedTensors:
    """Named tensors that change in good steps only."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = dict(values)
        self._proposed: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def propose(self, name: str, value: Tensor) -> None:
        """Set the value of ``name`` after this step."""
        if name in self._proposed:
            raise ValueError(f"{name!r} was sent twice without a commit between")
        self._proposed[name] = value

    @torch.no_grad()
    def commit(self, good: Tensor | bool) -> None:
        """Accept the proposed values or, where ``good`` (0-dim bool, on its device) is false, leave all bit-equal."""
        for name, value in self._proposed.items():
            old = self._values[name]
            torch.where(torch.as_tensor(good, device=old.device), value, old, out=old)
        self._proposed.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors by name, not copies."""
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError unless names, shapes and dtypes are equal."""
        mine = {name: f"{list(v.shape)} {v.dtype}" for name, v in self._values.items()}
        theirs = {name: f"{list(v.shape)} {v.dtype}" for name, v in state.items()}
        if mine != theirs:
            name = min(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
            raise CheckpointError(
                given=f"compression state {name!r} is {theirs.get(name, 'missing')} in the checkpoint "
                f"and {mine.get(name, 'not used')} here",
                rule="a run continues with the compression and the parameters it had",
                consequence="its residuals would be lost, so nothing was loaded",
                nearest="resume with the compression of the checkpoint, or start a new run from its weights",
            )
        for name, value in state.items():
            self._values[name].copy_(value)
        self._proposed.clear()


class ErrorFeedback:
    """The residuals of one worker, by parameter name.

    ``values``: parameters or gradients, for names, shapes, dtypes and devices. ``worker`` keys the noise of codecs that
    round stochastically, so that the workers' errors average out.
    """

    def __init__(self, values: Mapping[str, Tensor], worker: int = 0) -> None:
        self._carried = CommittedTensors(
            {
                name: torch.zeros(v.numel(), dtype=accumulation_dtype(v.dtype), device=v.device)
                for name, v in values.items()
            }
        )
        self._worker = worker
        self._steps = 0
        self._sizes: dict[str, tuple[int, int]] = {}
        self._norms: dict[str, Tensor] = {}

    @torch.no_grad()
    def compensated(self, name: str, gradient: Tensor) -> Tensor:
        """Gradient plus residual, flat, in the residual's dtype."""
        self._norms[name] = torch.linalg.vector_norm(gradient, dtype=accumulation_dtype(gradient.dtype))
        return self._carried[name] + gradient.reshape(-1)

    @torch.no_grad()
    def record_sent(
        self, name: str, compensated: Tensor, decoded: Tensor, gradient_bytes: int, sent_bytes: int
    ) -> None:
        """Record that the receivers decode ``compensated`` as ``decoded``."""
        self._carried.propose(name, compensated - decoded)
        self._sizes[name] = gradient_bytes, sent_bytes

    @torch.no_grad()
    def encode(self, codec: Codec, name: str, gradient: Tensor) -> Tensor:
        """The code of ``gradient`` (any shape) plus residual, uint8 [nbytes]. ``commit`` before encoding the next of
        this name."""
        value = self.compensated(name, gradient)
        code = codec.encode(value, self._seed(name))
        self.record_sent(
            name, value, codec.decode(code, value.numel(), value.dtype, trusted=True), gradient.nbytes, code.numel()
        )
        return code

    def _seed(self, name: str) -> int:
        key = f"{self._worker}/{self._steps}/{name}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")

    def commit(self, good: Tensor | bool) -> None:
        """End the step of everything encoded so far. Where ``good`` is false its residuals are dropped."""
        self._carried.commit(good)
        self._steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        """The flat residual of each parameter, by name, and the number of steps: checkpointed state of one worker."""
        residuals = {f"residual/{name}": value for name, value in self._carried.state_dict().items()}
        return residuals | {"steps": torch.tensor(self._steps, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError for a state of other parameters."""
        self._carried.load_state_dict(
            {name.removeprefix("residual/"): value for name, value in state.items() if name != "steps"}
        )
        self._steps = int(state["steps"])

    def stats(self) -> dict[str, dict[str, float]]:
        """``bytes_in`` and ``bytes_out`` of a step, and ``residual``, its norm over the last gradient's, of each parameter
        that was sent.

        Synchronises with the device. A ``residual`` that grows from step to step means that the codec cannot keep up.
        """
        return {
            name: {
                "bytes_in": bytes_in,
                "bytes_out": bytes_out,
                "residual": float(torch.linalg.vector_norm(self._carried[name]) / self._norms[name].clamp_min(1e-30)),
            }
            for name, (bytes_in, bytes_out) in self._sizes.items()
        }
