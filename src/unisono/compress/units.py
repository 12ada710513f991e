"""What belongs to an attention head or a hidden unit: the tensors, their dims, and the layer that consumes it.

Scores, masks and smaller tensors all follow from this one table. Units form groups, of each of which equally many are kept,
such as the query heads of one key/value head, or the hidden units of one expert. A unit has a number in its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from unisono.models.bert import BERT
from unisono.models.gpt import GPT
from unisono.models.resnet import ResNet
from unisono.models.table import TableNet


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTensor:
    """A tensor of which each unit has an equal part of one dim, in the order of the units.

    Attributes:
        name: Name in the model's ``state_dict``.
        dim: The dim.
        stacked: Whether dim 0 counts the groups (experts), and ``dim`` the units of a group.
        is_parameter: Whether it is a parameter, not a statistic.
    """

    name: str
    dim: int
    stacked: bool = False
    is_parameter: bool = True

    def reduced(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over all dims but those of the units, [units · width] or [num_groups, units_per_group]."""
        kept = (0, self.dim) if self.stacked else (self.dim,)
        others = [dim for dim in range(tensor.dim()) if dim not in kept]
        return tensor.sum(others) if others else tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneUnits:
    """The units of one kind whose outputs one layer consumes.

    Attributes:
        kind: "heads" or "ffn".
        block: Name of the block.
        num_groups: Groups of units, of each of which equally many are kept.
        units_per_group: Units of a group.
        tensors: The tensors of which each unit has a part.
        consumer: The weight of the layer that consumes the units, one of ``tensors``: where its columns are 0, a unit has no
            effect.
    """

    kind: str
    block: str
    num_groups: int
    units_per_group: int
    tensors: tuple[UnitTensor, ...]
    consumer: UnitTensor

    def per_unit(self, values: Tensor) -> Tensor:
        """The sums of ``values`` [num_groups · units_per_group · width] for each unit, [num_groups, units_per_group]."""
        return values.reshape(self.num_groups, self.units_per_group, -1).sum(-1)

    def index(self, size: int, chosen: Tensor) -> Tensor:
        """The places of the units ``chosen`` [num_groups, n] in a dim of ``size``; not for stacked tensors."""
        width = size // (self.num_groups * self.units_per_group)
        units = chosen + torch.arange(self.num_groups)[:, None] * self.units_per_group  # [num_groups, n]
        return (units.flatten()[:, None] * width + torch.arange(width)).flatten()

    def select(self, part: UnitTensor, tensor: Tensor, chosen: Tensor) -> Tensor:
        """The values in ``tensor``, which ``part`` describes, of the units ``chosen`` [num_groups, n]."""
        if part.stacked:
            pairs = zip(tensor, chosen.to(tensor.device), strict=True)
            return torch.stack([values.index_select(part.dim - 1, units) for values, units in pairs])
        return tensor.index_select(part.dim, self.index(tensor.shape[part.dim], chosen).to(tensor.device))

    @torch.no_grad()
    def mask(self, weight: Tensor, chosen: Tensor) -> None:
        """Set to 0 the columns of the consumer's ``weight`` of units other than ``chosen`` [num_groups, n]."""
        kept = torch.zeros(self.num_groups, self.units_per_group, dtype=torch.bool).scatter_(1, chosen, True)
        shape = [1] * weight.dim()
        if self.consumer.stacked:
            shape[0], shape[self.consumer.dim] = self.num_groups, self.units_per_group
        else:
            kept = kept.flatten().repeat_interleave(weight.shape[self.consumer.dim] // kept.numel())
            shape[self.consumer.dim] = -1
        weight.mul_(kept.reshape(shape).to(weight))


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Where a class of models has its blocks, heads and hidden units.

    Attributes:
        what: Its name, for errors.
        blocks: Name of the list of blocks.
        attention: Names, in a block, of the layers of queries, keys, values and output; empty where heads cannot be removed.
        ffn: For each hidden layer of a block: the modules that compute its units, and the layer that consumes them.
        experts: Name, in a block, of stacked experts; empty without.
        refused: Why a kind of pruning ("heads", "ffn" or "layers") has no model as its result.
    """

    what: str
    blocks: str
    attention: tuple[str, str, str, str] | tuple[()] = ()
    ffn: tuple[tuple[tuple[str, ...], str], ...] = ()
    experts: str = ""
    refused: Mapping[str, str] = field(default_factory=dict[str, str])


_BERT_HEADS: Final = "a BERT has no width of a head of its own: it is dim / num_heads"
_GPT: Final = ("attention.q", "attention.k", "attention.v", "attention.out")
_LLAMA: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LLAMA_LIKE: Final = ("llama", "mistral", "qwen2", "qwen3")
BERT_LIKE: Final = ("bert", "roberta")
KNOWN: Final = f"gpt, moe, bert, resnet and mlp, and of transformers {', '.join((*LLAMA_LIKE, *BERT_LIKE))}"


def architecture_of(model: nn.Module) -> Architecture | None:
    """The architecture of a model; None for one that the table does not have."""
    if isinstance(model, GPT):
        if model.options.num_experts:
            return Architecture(what="a GPT", blocks="blocks", attention=_GPT, experts="ffn.experts")
        return Architecture(what="a GPT", blocks="blocks", attention=_GPT, ffn=((("ffn.gate", "ffn.up"), "ffn.down"),))
    if isinstance(model, BERT):
        ffn = ((("ffn.up",), "ffn.down"),)
        return Architecture(what="a BERT", blocks="blocks", ffn=ffn, refused={"heads": _BERT_HEADS})
    if isinstance(model, ResNet):
        refused = {
            "heads": "a ResNet has no attention",
            "layers": "the name of a ResNet tells its depth, such as resnet26",
        }
        ffn = ((("conv1", "norm1"), "conv2"), (("conv2", "norm2"), "conv3"))
        return Architecture(what="a ResNet", blocks="blocks", ffn=ffn, refused=refused)
    if isinstance(model, TableNet):
        refused = {"heads": "an mlp has no attention", "ffn": "hidden layers of an mlp have twice the width model.dim"}
        return Architecture(what="an mlp", blocks="blocks", refused=refused)
    family = family_of(model)
    if family in LLAMA_LIKE:
        blocks = _list_of(model, "layers")
        ffn = ((("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),)
        return Architecture(what=type(model).__name__, blocks=blocks, attention=_LLAMA, ffn=ffn)
    if family in BERT_LIKE:
        blocks = _list_of(model, "encoder.layer")
        ffn = ((("intermediate.dense",), "output.dense"),)
        return Architecture(what=type(model).__name__, blocks=blocks, ffn=ffn, refused={"heads": _BERT_HEADS})
    return None


def family_of(model: nn.Module) -> str:
    """``model_type`` of a model of transformers; empty for another, and for one with adapters."""
    if not hasattr(model, "base_model_prefix") or hasattr(model, "peft_config"):
        return ""
    return str(getattr(cast(Any, model).config, "model_type", ""))


def _list_of(model: nn.Module, inner: str) -> str:
    prefix = str(cast(Any, model).base_model_prefix)
    return f"{prefix}.{inner}" if hasattr(model, prefix) else inner


def block_names(model: nn.Module, architecture: Architecture) -> list[str]:
    """Names of the blocks, in their order."""
    blocks = cast(nn.ModuleList, model.get_submodule(architecture.blocks))
    return [f"{architecture.blocks}.{number}" for number in range(len(blocks))]


def head_counts(model: nn.Module) -> tuple[int, int]:
    """Query heads and key/value heads of a block."""
    if isinstance(model, GPT):
        return model.options.num_heads, model.options.num_kv_heads
    config: Any = cast(Any, model).config
    return config.num_attention_heads, config.num_key_value_heads


def head_units(model: nn.Module, architecture: Architecture, *, whole_groups: bool) -> Iterator[PruneUnits]:
    """The heads of each block.

    Args:
        model: The model, whose heads can be removed.
        architecture: Its architecture.
        whole_groups: Whether a unit is a key/value head with its query heads, or one of the query heads of each.
    """
    heads, kv_heads = head_counts(model)
    num_groups, units_per_group = (1, kv_heads) if whole_groups else (kv_heads, heads // kv_heads)
    tensors = model.state_dict(keep_vars=True)
    for block in block_names(model, architecture):
        query, key, value, out = (f"{block}.{name}" for name in cast("tuple[str, ...]", architecture.attention))
        producers = (query, key, value) if whole_groups else (query,)
        consumer = UnitTensor(name=f"{out}.weight", dim=1)
        yield PruneUnits(
            kind="heads",
            block=block,
            num_groups=num_groups,
            units_per_group=units_per_group,
            tensors=(*_produced(tensors, producers), consumer),
            consumer=consumer,
        )


def query_heads(model: nn.Module, units: PruneUnits, chosen: Tensor) -> list[int]:
    """The numbers in the model of the query heads of ``chosen`` [num_groups, n], units of ``head_units``."""
    return units.index(head_counts(model)[0], chosen).tolist()


def hidden_units(model: nn.Module, architecture: Architecture) -> Iterator[PruneUnits]:
    """The hidden units of each block."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for block in block_names(model, architecture):
        if architecture.experts:
            gate, up, down = (f"{block}.{architecture.experts}.{name}" for name in ("gate", "up", "down"))
            num_experts, width = tensors[gate].shape[:2]
            consumer = UnitTensor(name=down, dim=2, stacked=True)
            yield PruneUnits(
                kind="ffn",
                block=block,
                num_groups=num_experts,
                units_per_group=width,
                tensors=(*(UnitTensor(name=name, dim=1, stacked=True) for name in (gate, up)), consumer),
                consumer=consumer,
            )
        for producers, layer in architecture.ffn:
            consumer = UnitTensor(name=f"{block}.{layer}.weight", dim=1)
            yield PruneUnits(
                kind="ffn",
                block=block,
                num_groups=1,
                units_per_group=tensors[consumer.name].shape[1],
                tensors=(*_produced(tensors, tuple(f"{block}.{name}" for name in producers)), consumer),
                consumer=consumer,
            )


def _produced(tensors: Mapping[str, Tensor], modules: tuple[str, ...]) -> Iterator[UnitTensor]:
    """The tensors of modules, of which dim 0 counts their outputs."""
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] in modules and tensor.dim():
            yield UnitTensor(name=name, dim=0, is_parameter=isinstance(tensor, nn.Parameter))
