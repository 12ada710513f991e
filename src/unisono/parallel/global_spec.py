"""The whole model's parameters by name, written down before anything is cut: what all ranks together must hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """One parameter as it is whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalParameterSpec:
    """``entries`` by first name; ``first_names`` from every name, as a parameter that is used twice may have several."""

    parameters: dict[str, ParameterSpec]
    first_names: dict[str, str]

    @staticmethod
    def from_model(model: nn.Module) -> GlobalParameterSpec:
        """Of a model that is not cut yet; its parameters may be on the meta device."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        return GlobalParameterSpec(
            parameters={
                name: ParameterSpec(shape=tuple(p.shape), dtype=p.dtype, trained=p.requires_grad)
                for name, p in model.named_parameters()
            },
            first_names={alias: names[p] for alias, p in model.named_parameters(remove_duplicate=False)},
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(entry.numel for entry in self.parameters.values())
