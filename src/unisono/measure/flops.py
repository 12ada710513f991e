"""Floating point operations of a transformer's training step, and their share of a device's peak.

Model FLOPs per token = 6 N + 12 L h s (Chowdhery et al. 2022, PaLM, appendix B). N counts parameters that enter a matrix
product: not the embedding table, but the output head, also if it is tied to the table; of experts, those that a token is
routed to. L layers attend over s positions with h = heads x head size; the s x s score matrix counts in full, although a
causal kernel may compute half of it. Backward counts as twice forward. Recomputed activations do not count: this is model
FLOPs utilisation (MFU), not hardware FLOPs utilisation. ``CONVENTION`` is shown with every such number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import nn

    from unisono.measure.ceiling import PeakFlops

CONVENTION: Final = (
    "6N + 12Lhs per token (PaLM, appendix B), N without embedding tables and idle experts, recompute not counted"
)


def transformer_flops_per_token(*, matmul_params: int, layers: int, attention_dim: int, seq_len: int) -> int:
    """FLOPs of forward and backward per trained token: 6 N + 12 L h s.

    Args:
        matmul_params: Parameters that enter a token's matrix products (N), without idle experts.
        layers: Number of attention layers (L).
        attention_dim: Query heads times head size (h).
        seq_len: Positions that attention spans (s).

    Source:
        Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return 6 * matmul_params + 12 * layers * attention_dim * seq_len


def matmul_params(model: nn.Module) -> int:
    """Number of parameters of ``model`` that enter matrix products: all but embedding tables that no other layer shares.

    Counts all experts of a mixture; ``unisono.models.moe.inactive_parameters`` counts the idle ones. Norms and biases are
    included, as they are few. Parameters may be on the meta device.
    """
    from torch import nn

    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    return sum(p.numel() for p in model.parameters() if id(p) in elsewhere or id(p) not in tables)


def utilization(*, tokens_per_s_device: float, flops_per_token: float, peak: PeakFlops) -> dict[str, float]:
    """Achieved rate and its share of the peak, as fields of a step event.

    Args:
        tokens_per_s_device: Tokens per second and device.
        flops_per_token: FLOPs per token; see ``transformer_flops_per_token``.
        peak: Peak rate of the device; see ``peak_flops``.

    Returns:
        ``perf/tflops_device``, and the share: ``perf/mfu`` of a datasheet peak, ``perf/matmul_ceiling_frac`` of a measured
        one, or both. The two shares are not comparable.
    """
    flops_per_s = tokens_per_s_device * flops_per_token
    measured = peak.value if peak.kind == "measured" else peak.measured_value
    return {
        "perf/tflops_device": flops_per_s / 1e12,
        **({"perf/mfu": flops_per_s / peak.value} if peak.kind == "datasheet" else {}),
        **({"perf/matmul_ceiling_frac": flops_per_s / measured} if measured else {}),
    }
