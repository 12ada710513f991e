"""What a block of PyTorch's operators keeps for its backward pass, beside what is counted of its shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unisono.planner.devices import DEVICES
from unisono.planner.layout import Kept, Layout
from unisono.planner.model_shape import ModelShape
from unisono.planner.peak_memory import peak_memory

SEQUENCES, TOKENS = 2, 64
SHAPE = ModelShape(layers=1, hidden=128, heads=8, kv_heads=2, head_dim=16, ffn=256, gated=True, vocab=64)
LAYOUT = Layout(
    model=SHAPE,
    device=DEVICES["h100"],
    precision="bf16",
    num_devices=2,
    zero=3,
    dp_shard=2,
    micro_batch=SEQUENCES,
    global_batch=2 * SEQUENCES,
    seq_len=TOKENS,
)
ROOTS = 2 * 4  # bytes of a token, of both norms' roots in 32 bits: not counted


class Norm(nn.Module):
    """RMSNorm of single operators, in 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SHAPE.hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.scale


class Block(nn.Module):
    """A block of Llama's; keys and values are repeated for each query head."""

    def __init__(self) -> None:
        super().__init__()
        hidden, key_value = SHAPE.hidden, SHAPE.kv_heads * SHAPE.head_dim
        linear = partial(nn.Linear, bias=False)
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.query, self.key, self.value = (linear(hidden, width) for width in (hidden, key_value, key_value))
        self.out = linear(hidden, hidden)
        self.gate, self.up, self.down = linear(hidden, SHAPE.ffn), linear(hidden, SHAPE.ffn), linear(SHAPE.ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        query, key, value = (
            layer(normed).view(SEQUENCES, TOKENS, -1, SHAPE.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        times = SHAPE.heads // SHAPE.kv_heads
        key, value = (each.repeat_interleave(times, dim=1) for each in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(SEQUENCES, TOKENS, -1))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def kept_bytes(block: nn.Module, forward: Callable[[Tensor], Tensor]) -> float:
    """Bytes of a token that autograd saves, parameters left out."""
    parameters = {each.untyped_storage().data_ptr() for each in block.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage().data_ptr()
        if key not in parameters:
            saved[key] = tensor
        return tensor

    x = torch.randn(SEQUENCES, TOKENS, SHAPE.hidden, dtype=torch.bfloat16, requires_grad=True) * 1
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(x).sum().backward()
    return sum(each.untyped_storage().nbytes() for each in saved.values()) / (SEQUENCES * TOKENS)


def counted(keeps: tuple[Kept, ...], **changes: Any) -> float:
    found = peak_memory([replace(LAYOUT, keeps=keeps, **changes)])
    return float(found.activations[0]) / (SEQUENCES * TOKENS)


def compiled(forward: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """With the partition of forward and backward pass that Inductor has."""
    return torch.compile(forward, backend="aot_eager_decomp_partition", fullgraph=True)


def saves_every_second_product() -> Any:
    """As torchtitan's selective checkpoint."""
    products: defaultdict[bool, int] = defaultdict(int)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = operator == torch.ops.aten.mm.default
        products[context.is_recompute] += is_product
        saves = operator == attention or (is_product and products[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().bfloat16()


def test_an_eager_block_keeps_norms_in_32_bits_and_repeated_keys(block: Block) -> None:
    assert kept_bytes(block, block) == counted(("norms in 32 bits", "repeated keys")) + ROOTS


@pytest.mark.full
def test_a_compiled_block_keeps_neither_wide_norms_nor_silu(block: Block) -> None:
    keeps: tuple[Kept, ...] = ("norms in 32 bits", "repeated keys")
    assert kept_bytes(block, compiled(block)) == counted(keeps, compiled=True) + ROOTS


@pytest.mark.full
def test_a_compiled_block_with_selective_recompute_drops_the_last_product(block: Block) -> None:
    selective = partial(
        checkpoint, block, use_reentrant=False, context_fn=saves_every_second_product, preserve_rng_state=False
    )
    assert kept_bytes(block, compiled(selective)) == counted((), compiled=True, recompute="selective")


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_projection_copies_attention_of_several_sequences_in_the_second_dimension(sequences: int) -> None:
    projection = nn.Linear(8, 3, bias=False)
    attended = torch.randn(sequences, 4, 8, requires_grad=True) * 1
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor):
        projection(attended.transpose(0, 1))
    inputs = [each for each in saved if each.shape[-1] == 8 and each.numel() == attended.numel()]
    assert len(inputs) == 1
    assert (inputs[0].data_ptr() == attended.data_ptr()) == (sequences == 1)
