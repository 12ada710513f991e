"""What programs of published rows keep in memory, as their own published code and configurations say.

``published_memory`` alone reads them: they say nothing of time, or nothing that constants of step times were fitted with.
Nothing here is fitted to a peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Final

from benchmarks.planner.corrections import Correction, Row


def nanotron_cut(row: Row) -> tuple[int, ...]:
    """Blocks of each pipeline rank: a rank takes blocks until it has more than its part of all products of matrices.

    Those of the output matrix come last, and its rank may have no block.
    """
    layers, hidden, ffn, vocab, pp = (int(row[name]) for name in ("layers", "hidden", "ffn", "vocab", "pp"))
    block, head = 4 * hidden * hidden + 3 * hidden * ffn, vocab * hidden
    whole = layers * block + head
    ranks, rank = [0] * pp, 0
    for cost in accumulate([block] * layers):
        ranks[rank] += 1
        rank += cost > whole * (rank + 1) / pp
    return tuple(ranks)


def _nanotron(row: Row) -> Mapping[str, str]:
    blocks = ",".join(map(str, nanotron_cut(row)))
    cut = {"cut": "given", "layers_per_stage": blocks} if int(row["pp"]) > 1 else {}
    return {"tied": "true", "keeps": "gathered inputs, attention twice", "notes": "loss in place", **cut}


def _is_of_2025(row: Row) -> bool:
    return row["gpu_type"].startswith(("MI300X", "B200"))


KEPT_BY_PROGRAMS: Final = (
    Correction(
        source="huggingface.co/nanotron",
        columns=_nanotron,
        text="nanotron 0.4 on PyPI: models/base.py, build_model; models/llama.py, where sequences are the second dimension; "
        "parallel/tensor_parallel/functional.py: column_linear gathers before a linear layer that keeps its input, unless "
        "communication is asynchronous, which is not the default; the cross entropy's backward pass writes over the softmax",
    ),
    Correction(
        source="Lightning-AI/litgpt",
        columns={"global_batch": "16", "keeps": "norms in 32 bits, repeated keys"},
        text="litgpt 0.4 on PyPI: finetune/full.py, 16 sequences in a step, so gradients are there during the forward pass; "
        "model.py: RMSNorm in 32 bits, keys and values of each query head",
    ),
    Correction(
        source="pytorch/torchtune",
        columns={"keeps": "norms in 32 bits, repeated keys"},
        text="torchtune 0.3 on PyPI: modules/rms_norm.py, modules/attention.py",
    ),
    Correction(
        source="pytorch/torchtune",
        where=lambda row: row["gpus"] == "1",
        columns={"precision": "bf16-true"},
        text="torchtune 0.3 on PyPI: recipes/full_finetune_single_device.py, which makes weights, and states from them, in bf16",
    ),
    Correction(
        source="pytorch/torchtune",
        where=lambda row: (
            "cumulative" in row["notes"] and "baseline" not in row["notes"] and "packed" not in row["notes"]
        ),
        columns={"notes": "compile"},
        text="README.md, table of memory and speed: each step has what those above it have, and compile is the second",
    ),
    Correction(
        source="pytorch/torchtune",
        where=lambda row: (
            "chunked cross-entropy" in row["notes"] or ("cumulative" in row["notes"] and row["recompute"] == "full")
        ),
        columns={"notes": "fused loss"},
        text="torchtune 0.3 on PyPI: modules/loss/ce_chunked_output_loss.py converts an eighth of the logits at a time; compile "
        "is before it in the same table",
    ),
    Correction(
        source="pytorch/torchtitan benchmarks/llama3-8b_h200_202506",
        columns={"recompute": "selective", "notes": "fused loss"},
        text="torchtitan 0.1 on PyPI, of June 2025: components/loss.py compiles the loss with the model; the model's "
        "configuration has activation checkpointing selective, by operators",
    ),
    Correction(
        source="pytorch/ao",
        where=_is_of_2025,
        columns={"notes": "fused loss"},
        text="torchtitan 0.1 on PyPI: components/loss.py compiles the loss with the model; rows of H100 are older",
    ),
)
