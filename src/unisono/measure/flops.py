"""The floating-point operations of a transformer's training step, and the fraction of a device's peak they are.

Convention, stated wherever a number made with it is shown: model FLOPs per token = 6 N + 12 L h s (Chowdhery et al.
2022, PaLM, appendix B). N counts parameters that enter a matrix product: no embedding table, but the output head, also
when it is tied to the table; of experts, those that a token goes to. L layers attend over s positions with h = heads x
head size; the s x s score matrix is counted in full, although a causal kernel may compute half of it. Backward counts as
twice forward. Recomputed activations do not count: this is model FLOPs utilisation (MFU), not hardware FLOPs utilisation.
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
    """FLOPs of forward and backward per trained token.

    ``matmul_params`` is N of the convention (see ``matmul_params``, which counts all experts), ``attention_dim`` = query
    heads x head size, ``seq_len`` the length of the window attention spans.
    """
    return 6 * matmul_params + 12 * layers * attention_dim * seq_len


def matmul_params(model: nn.Module) -> int:
    """Number of parameters that enter matrix products: all but embedding tables; a table shared with another layer
    counts once.

    All experts of a mixture are in it: which are idle, its module knows. Gains and biases are included; beside the matrices
    they do not matter. Parameters may live on the meta device.
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
    """Fields of a step event: ``perf/tflops_device`` and the share of the peak.

    The share is called ``perf/mfu`` against a datasheet peak and ``perf/matmul_ceiling_frac`` against a measured one:
    the two do not compare.
    """
    flops_per_s = tokens_per_s_device * flops_per_token
    name = "perf/mfu" if peak.kind == "datasheet" else "perf/matmul_ceiling_frac"
    return {"perf/tflops_device": flops_per_s / 1e12, name: flops_per_s / peak.value}
