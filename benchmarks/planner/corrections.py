"""What rows of published runs leave out or have otherwise than the public text that they are from.

``published_runs.csv`` stays as it is. Each correction names that text. ``fitting.read_runs`` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Other columns of some rows.

    Attributes:
        source: A part of the ``source`` of these rows.
        columns: The columns that change, by name; ``notes`` are appended.
        text: The public text that says so.
        where: Which rows of the source; None: all.
    """

    source: str
    columns: Mapping[str, str] | Callable[[Row], Mapping[str, str]]
    text: str
    where: Callable[[Row], bool] | None = None


def _noted(words: str) -> Callable[[Row], bool]:
    return lambda row: words in row["notes"]


def _is_full(row: Row) -> bool:
    return row["recompute"] == "full"


def _after_last_matrix(row: Row) -> Mapping[str, str]:
    """Recompute that ends before the last matrix of a block: blocks with as many FLOPs."""
    layers = _LAYERS[row["model"]]
    return {"recompute": "partial", "recomputed_blocks": str(round(layers * (1 - _LAST_MATRIX)))}


# of a Llama's block, the products of the down projection: 27 to 29 % of 7 to 70 billion parameters
_LAST_MATRIX: Final = 0.28
_LAYERS: Final = {
    **{"llama3.1-8b": 32, "llama3.1-70b": 80, "llama3-70b": 80, "llama2-70b": 80, "llama2-13b": 40, "llama3.2-3b": 28},
    **{"llama3-8b": 32, "llama3.1-405b": 126},
}
_A3_HIGH_GBIT_PER_S: Final = 100.0
# Gbit/s of each device to other domains, where a row says what the data sheet's system does not have
NETWORK: Final[Mapping[str, float]] = {"src/maxtext/configs/gpu/a3/": _A3_HIGH_GBIT_PER_S}
NETWORK_TEXT: Final = (
    "cloud.google.com/compute/docs/gpus/gpu-network-bandwidth: A3 High has 4 cards of 200 Gbit/s for 8 devices"
)

CORRECTIONS: Final = (
    Correction(
        source="mosaicml/llm-foundry",
        where=_noted("SHARD_GRAD_OP"),
        columns={"zero": "2"},
        text="scripts/train/benchmarking/README.md, column Sharding Strategy: FSDP's SHARD_GRAD_OP gathers parameters once",
    ),
    Correction(
        source="mosaicml/llm-foundry",
        columns={"notes": "eager; FlashAttention-1 in Triton"},
        text="scripts/train/benchmarking/submit_benchmarks.py: attn_impl is triton unless it is given, and sweep.sh gives none; "
        "PyTorch 1.13 and 2.0 without compile",
    ),
    Correction(
        source="NVIDIA/Megatron-LM images/tables.tex",
        columns={"seq_len": "1024", "notes": "FLOPs include recompute"},
        text="its batch, step time and TFLOP/s agree with 96 B s l h^2 (1 + s/6h + V/16lh) for 1,024 tokens and no other length",
    ),
    Correction(
        source="deepspeedai/DeepSpeed docs/_posts/2022-07-26-deepspeed-azure.md",
        columns={"notes": "FLOPs include recompute"},
        text="section Performance Evaluation: FLOPs/GPU = 96 B s l h^2 (1 + s/6h + V/16lh) for all models",
    ),
    Correction(
        source="deepspeedai/DeepSpeed docs/_posts/2022-07-26-deepspeed-azure.md",
        where=lambda row: row["model"] == "gpt-175b",
        columns={"seq_len": "512"},
        text="204.49 TFLOP/s on 256 devices, with a micro-batch of 32 and a sequence length of 512",
    ),
    Correction(
        source="pytorch/torchtune",
        where=_noted("LoRA instead"),
        columns={"model": "llama3.2-3b LoRA"},
        text="README.md, table of memory and speed: these steps train adapters alone",
    ),
    Correction(
        source="pytorch/torchtune",
        where=lambda row: (
            "cumulative" in row["notes"] and "baseline" not in row["notes"] and "packed dataset" not in row["notes"]
        ),
        columns={"notes": "compile"},
        text="README.md, the same table: each step has what those above it have, and compile is the second",
    ),
    Correction(
        source="pytorch/torchtune",
        where=lambda row: "packed dataset" in row["notes"],
        columns={"notes": "eager"},
        text="README.md, the same table: the step before compile",
    ),
    Correction(
        source="pytorch/torchtitan docs/performance.md",
        columns={"notes": "eager"},
        text="docs/performance.md at 3faaa1a0d: numbers without compile",
    ),
    Correction(
        source="pytorch/torchtitan",
        where=_is_full,
        columns=_after_last_matrix,
        text="torch.utils.checkpoint.set_checkpoint_early_stop: recompute ends once all saved tensors are there",
    ),
    Correction(
        source="pytorch/torchtune",
        where=_is_full,
        columns=_after_last_matrix,
        text="torch.utils.checkpoint.set_checkpoint_early_stop: recompute ends once all saved tensors are there",
    ),
    Correction(
        source="AI-Hypercomputer/maxtext src/maxtext/configs/gpu/a3/llama_2_7b",
        columns=lambda row: {
            **{"micro_batch": "4", "fsdp": "8", "recompute": "selective"},
            "global_batch": str(4 * int(row["gpus"])),
        },
        text="configs/gpu/models/llama2_7b.yml: per_device_batch_size 4, remat_policy minimal_with_context; "
        "configs/gpu/a3/llama_2_7b/16vm.sh: ici_fsdp_parallelism=8 dcn_data_parallelism=16",
    ),
    Correction(
        source="NVIDIA/dgxc-benchmarking maxtext/README_70b.md",
        columns={"recompute": "partial", "recomputed_blocks": "50"},
        text="maxtext/configure.sh at v25.04: remat_policy save_qkv_proj; without those and the last matrix of a block, 63 % "
        "of a forward pass is repeated",
    ),
    Correction(
        source="AI-Hypercomputer/gpu-recipes training/a3ultra/llama3-1-70b",
        columns={
            **{"fsdp": "128", "micro_batch": "2", "global_batch": "512"},
            **{"recompute": "partial", "recomputed_blocks": "44"},
        },
        text="src/frameworks/a3ultra/maxtext-configs/llama-3.1-70b-256gpus-a3u-bf16.yaml: fsdp 16 x 8, 2 sequences, "
        "remat_policy save_dot_with_context_except_mlp, of which the last matrix is not repeated",
    ),
    Correction(
        source="AI-Hypercomputer/gpu-recipes training/a4/llama3-1-70b",
        columns={
            **{"precision": "fp8", "fsdp": "256", "micro_batch": "8", "global_batch": "2048"},
            **{"recompute": "partial", "recomputed_blocks": "58"},
        },
        text="src/frameworks/a4/maxtext-configs/llama3-1-70b-256gpus-a4-fp8.yaml: quantization fp8, fsdp 32 x 8, 8 sequences, "
        "remat_policy full; the README divides by the peak in 16 bits",
    ),
    Correction(
        source="AI-Hypercomputer/gpu-recipes training/a4/llama3-1-405b",
        columns={
            **{"precision": "fp8", "fsdp": "128", "micro_batch": "2", "global_batch": "512"},
            **{"recompute": "partial", "recomputed_blocks": "90"},
        },
        text="src/frameworks/a4/maxtext-configs/llama3-1-405b-256gpus-a4-fp8.yaml: quantization fp8, fsdp 16 x 8, 2 sequences, "
        "remat_policy full",
    ),
    *(
        Correction(
            source=source,
            where=where,
            columns={"notes": "stored scores"},
            text="older than FlashAttention (arXiv 2205.14135, of May 2022), or on a release before it",
        )
        for source, where in (
            ("arXiv:2104.04473", None),
            ("NVIDIA/Megatron-LM images/tables.tex", None),
            ("arXiv:2205.05198", None),
            ("deepspeedai/DeepSpeed docs/_posts/2022-07-26-deepspeed-azure.md", None),
            ("deepspeedai/DeepSpeed docs/_posts/2021-03-08-zero3-offload.md", None),
            ("zhebrak/llm-cluster-simulator", lambda row: row["model"] in ("bloom-176b", "mt-nlg-530b")),
        )
    ),
)


def corrected(row: Row, corrections: Sequence[Correction] = CORRECTIONS) -> dict[str, str]:
    """A row as the text that it is from has it."""
    found = dict(row)
    for correction in corrections:
        if correction.source not in row["source"] or (correction.where is not None and not correction.where(row)):
            continue
        changes = correction.columns(row) if callable(correction.columns) else correction.columns
        for column, value in changes.items():
            found[column] = f"{found[column]}; {value}" if column == "notes" else value
    return found


def network_bytes_per_s(row: Row, otherwise: float) -> float:
    """Bandwidth of a device to other domains: the row's ``network_gbit_per_s``, or ``NETWORK``."""
    if row.get("network_gbit_per_s"):
        return float(row["network_gbit_per_s"]) / 8 * 1e9
    known = (gbit for source, gbit in NETWORK.items() if source in row["source"])
    return next((gbit / 8 * 1e9 for gbit in known), otherwise)
