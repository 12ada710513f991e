"""The kinds ``local`` and ``device``: one process adds the values of a push, and nothing is sent.

``local`` adds and stores on the host. ``device`` adds on the accelerator that holds the push's first value and stores
on the device of ``init``'s value. (MXNet's ``device`` chooses the least loaded accelerator per key.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from unisono.errors import ConfigError
from unisono.kvstore.compression.registry import no_traffic_to_compress
from unisono.kvstore.keys import Future, PushValue, SparseRows
from unisono.kvstore.value_store import Updater, ValueStore
from unisono.optim.options import OptimOptions

HOST = torch.device("cpu")


class LocalBackend:
    """Values on the host, or on the devices of ``init``'s values."""

    def __init__(self, *, on_host: bool = False) -> None:
        self._on_host = on_host
        self._values = ValueStore()

    def init(self, values: Mapping[str, Tensor]) -> None:
        self._values.init({key: value.to(HOST) if self._on_host else value for key, value in values.items()})

    def reduce_device(self, key: str, first: Tensor) -> torch.device:
        """The host, or the first value's accelerator. Raises ConfigError for a host tensor pushed to 'device'."""
        if self._on_host:
            return HOST
        if first.device.type == "cpu":
            raise ConfigError(
                given=f"a value of key {key!r} on the host, pushed to a store of kind 'device'",
                rule="'device' adds on the accelerator that holds the first value",
                consequence="nothing was added",
                nearest="kind = 'local', which adds on the host",
            )
        return first.device

    def push(self, items: Sequence[tuple[str, PushValue]], priority: int) -> Future[None]:
        for key, value in items:
            self._values.apply(key, value)
        return Future(lambda: None)

    def pull(self, items: Sequence[tuple[str, list[Tensor]]], priority: int) -> Future[None]:
        return self._values.copy_to(items)

    def pull_rows(self, key: str, ids: Tensor) -> Future[SparseRows]:
        return self._values.pull_rows(key, ids)

    def barrier(self) -> None:
        pass

    def set_optimizer(self, options: OptimOptions) -> None:
        self._values.set_optimizer(options)

    def set_updater(self, updater: Updater) -> None:
        self._values.set_updater(updater)

    def set_learning_rate(self, lr: float) -> None:
        self._values.set_learning_rate(lr)

    def set_compression(self, codec: str | None) -> None:
        """Raises ConfigError for any codec: nothing is sent."""
        if codec is not None:
            raise no_traffic_to_compress(codec, "on a store of one process")

    def stats(self) -> dict[str, dict[str, float]]:
        return {}

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return self._values.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._values.load_state_dict(state)

    def close(self) -> None:
        self._values = ValueStore()


class LocalGradientSync:
    """The gradient synchronisation of one worker: sends nothing; a parameter without a gradient gets zeros, as it does
    where workers sum."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = list(parameters.values())

    def prepare_last_backward(self, part: Sequence[nn.Module] | None = None) -> None:
        pass

    def wait(self, totals: Tensor) -> None:
        """Materialise the gradients that no sample used; ``totals`` is already complete."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def zero_grad(self) -> None:
        """Drop the gradients, so that the next backward pass stores its own instead of adding to zeros."""
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        self.zero_grad()
