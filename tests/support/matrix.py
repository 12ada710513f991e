"""Which plans are held equal to one process: models, cases, and how one case is run on its ranks.

``docs/what-runs.md`` is written from ``CASES`` and ``REFUSED`` (``python tests/support/matrix.py``); a test holds the page to
them, and ``tests/parallel/test_plan_matrix.py`` runs every one of them.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch

from unisono.dist import World
from unisono.errors import PlanError
from unisono.models.bert import BERT, BertOptions
from unisono.models.resnet import ResNet, ResNetOptions
from unisono.parallel.sharding import TensorShard
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.train.objectives import cross_entropy, masked_token, next_token

STEPS = 20
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@dataclass(frozen=True, kw_only=True)
class Case:
    """``axes`` above 1 and what else the plan says; the rest is the same in all cases of a model."""

    model: str
    axes: Mapping[str, int]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(np.prod([size for axis, size in self.axes.items() if axis != "ep"]))

    @property
    def name(self) -> str:
        axes = [f"{axis}{size}" for axis, size in self.axes.items()]
        return "-".join([self.model, *axes, *(f"{key}={value}" for key, value in self.settings.items())])

    def plan(self) -> dict[str, Any]:
        """As settings of a run; what is left of the ranks is ``dp_replicate``."""
        axes = {axis: size for axis, size in self.axes.items() if axis != "dp_replicate"}
        return {**axes, **self.settings}


def _gpt(layers: int) -> tuple[torch.nn.Module, Any, Any]:
    return tiny.model(num_layers=layers, num_heads=4, num_kv_heads=2), tiny.RaggedTokens(), next_token


def _moe(layers: int, capacity_factor: float = 0.0) -> tuple[torch.nn.Module, Any, Any]:
    sizes = {
        "capacity_factor": capacity_factor,
        "num_layers": layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "ffn_dim": 16,
    }
    return tiny.model(**sizes), tiny.RaggedTokens(), next_token


def _llama(layers: int, attention: str = "eager") -> tuple[torch.nn.Module, Any, Any]:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCAB, num_hidden_layers=layers, max_position_embeddings=tiny.SEQ_LEN, use_cache=False, **sizes
    )
    config._attn_implementation = attention
    return transformers.LlamaForCausalLM(config), tiny.RaggedTokens(), next_token


def _bert(layers: int) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(0)
    return (
        BERT(
            BertOptions(
                vocab_size=tiny.VOCAB, num_layers=layers, dim=16, num_heads=4, ffn_dim=32, max_length=12, dropout=0.0
            )
        ),
        Masked(),
        masked_token,
    )


def _resnet(layers: int, norm: str = "group") -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(0)
    sizes = {"classes": 5, "depths": (layers // 2,) * 2, "widths": (8, 16), "groups": 4, "norm": norm, "stem": "small"}
    return ResNet(ResNetOptions(**sizes)), Images(), cross_entropy


class Masked:
    """Ragged sequences whose padding attention leaves out, a sixth of the tokens hidden."""

    fingerprint = "masked-1"

    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        self._tokens = rng.integers(1, tiny.VOCAB, (tiny.SAMPLES, tiny.SEQ_LEN))
        self._padding = np.arange(tiny.SEQ_LEN) < rng.integers(4, tiny.SEQ_LEN + 1, (tiny.SAMPLES, 1))
        self._hidden = (rng.random(self._tokens.shape) < 1 / 6) & self._padding

    def __len__(self) -> int:
        return tiny.SAMPLES

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens, hidden = self._tokens[indices], self._hidden[indices]
        return {
            "tokens": np.where(hidden, 0, tokens),
            "targets": tokens,
            "weights": hidden.astype(np.float32),
            "attention_mask": self._padding[indices],
        }


class Images:
    """Small random images of five kinds."""

    fingerprint = "images-1"

    def __init__(self, dtype: str = "float32") -> None:
        rng = np.random.default_rng(5)
        self._images = rng.standard_normal((tiny.SAMPLES, 3, 16, 16)).astype(np.float32).astype(dtype)
        self._targets = rng.integers(0, 5, tiny.SAMPLES)

    def __len__(self) -> int:
        return tiny.SAMPLES

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        ones = np.ones(len(indices), np.float32)
        return {"image": self._images[indices], "targets": self._targets[indices], "weights": ones}


MODELS: dict[str, Callable[[int], tuple[torch.nn.Module, Any, Any]]] = {
    "gpt": _gpt,
    "gpt-moe": _moe,
    # half of the choices are dropped where all experts get equally many
    "gpt-moe-capped": lambda layers: _moe(layers, 0.5),
    "llama": _llama,
    "llama-sdpa": lambda layers: _llama(layers, "sdpa"),
    "bert": _bert,
    "resnet": _resnet,
    "resnet-batchnorm": lambda layers: _resnet(layers, "batch"),
}


def reference_micro_batch(case: Case) -> int:
    """Batch statistics are of one micro-batch on all ranks together; to the other models it is all the same."""
    ranks = case.axes.get("dp_replicate", 1) if case.model == "resnet-batchnorm" else 1
    return int(settings_of(case)["micro_batch"]) * ranks if ranks > 1 else 6


def settings_of(case: Case) -> dict[str, Any]:
    """The whole run's: a batch that every number of ranks here divides, in several micro-batches, with clipping. What no pipeline
    cuts has two blocks and two micro-batches: eight ranks on few cores spend their time in collectives."""
    axes = case.axes
    ranks = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
    micro_batch = {1: 6, 2: 3, 3: 2, 4: 3}[ranks]
    short = "pp" not in axes and case.model != "resnet-batchnorm"  # whose micro-batch is a rank's whole share
    # batch statistics of small images let rounding grow tenfold in a few steps of the others' rate, on one process too
    lr = 1e-3 if case.model.startswith("resnet") else 1e-2
    size = {"layers": 2 if short else 4, "global_batch": 12 if short and ranks < 4 else 24}
    common = {"steps": STEPS, **size, "micro_batch": micro_batch, "clip_norm": 0.5, "lr": lr}
    return {**common, **case.plan()}


def run_case(world: World, model: str, settings: Mapping[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Losses and gradient norms of all steps, and this rank's blocks of the first step's gradients of the mean loss."""
    blocks: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]] = []
    layers, settings = settings["layers"], {name: value for name, value in settings.items() if name != "layers"}
    with tempfile.TemporaryDirectory() as folder:
        shared = str(world.broadcast_json(folder))
        network, data, objective = MODELS[model](layers)
        network = network.to(getattr(torch, dtype))
        if isinstance(data, Images):  # the only inputs that are no numbers of tokens
            data = Images(dtype)
        with tiny.trainer(shared, world=world, network=network, data=data, objective=objective, **settings) as run:
            pieces = run.state.sharded
            trained = {name: p for name, p in pieces.parameters.items() if p.requires_grad}

            def spy(step: int, gradients: list[torch.Tensor], divisor: torch.Tensor) -> None:
                if step:
                    return
                for (name, _), gradient in zip(trained.items(), gradients, strict=True):
                    whole = (gradient / divisor).detach()
                    shard = pieces.shard_of(name, whole) or TensorShard.whole(whole.shape)
                    blocks.append((name, shard.global_shape, shard.offset, whole.numpy().copy()))

            object.__setattr__(run._loop.runner.train_step, "observe_gradients", spy)
            losses, norms = [], []
            for step in run:
                losses.append(step.loss)
                norms.append(float(step.stats[1]))
        world.barrier()
    return {"losses": losses, "norms": norms, "blocks": blocks}


def gradients(outcomes: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The whole tensors, from the blocks of all ranks; where ranks hold the same block they must agree on it."""
    found: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for name, shape, offset, block in itertools.chain.from_iterable(outcome["blocks"] for outcome in outcomes):
        whole = found.setdefault(name, np.zeros(shape, block.dtype))
        known = filled.setdefault(name, np.zeros(shape, bool))
        place = tuple(slice(start, start + size) for start, size in zip(offset, block.shape, strict=True))
        again = known[place]
        np.testing.assert_allclose(whole[place][again], block[again], rtol=1e-6, atol=1e-9, err_msg=name)
        whole[place], known[place] = block, True
    assert all(known.all() for known in filled.values()), "ranks do not hold every element"
    return found


def _axes(text: str) -> dict[str, int]:
    """``"dp_shard2 tp2"`` → axes."""
    return {word.rstrip("0123456789"): int(word.lstrip("abcdefghijklmnopqrstuvwxyz_")) for word in text.split()}


_ALONE = ("dp_replicate2", "dp_replicate3", "dp_shard2", "dp_shard3", "tp2", "tp4", "cp2", "cp3", "pp2", "pp3", "pp4")
_FOUR = (
    "dp_replicate2 dp_shard2",
    "dp_replicate2 tp2",
    "dp_replicate2 cp2",
    "pp2 dp_replicate2",
    "dp_shard2 tp2",
    "pp2 dp_shard2",
    "dp_shard2 cp2",
    "pp2 tp2",
    "cp2 tp2",
    "pp2 cp2",
    "dp_shard3 tp2",
)
_EIGHT = (
    "pp2 dp_shard2 tp2",
    "dp_shard2 cp2 tp2",
    "dp_replicate2 dp_shard2 tp2",
    "pp2 cp2 tp2",
    "pp2 dp_replicate2 dp_shard2",
)
_GPT_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp_shard2", {"zero": 1}),
    ("dp_shard2", {"zero": 2}),
    ("dp_shard2", {"recompute": "full"}),
    ("dp_shard2", {"fsdp.shard_threshold_numel": 600, "fsdp.prefetch_blocks": 2}),
    ("pp2 dp_replicate2 dp_shard2", {"fsdp.shard_threshold_numel": 600, "zero": 1}),
    ("tp2", {"sequence_parallel": True}),
    ("dp_shard2 tp2", {"sequence_parallel": True}),
    ("pp2", {"schedule": "gpipe"}),
    ("pp2", {"schedule": "interleaved"}),
    ("pp2", {"schedule": "zbv"}),
    ("pp2", {"recompute": "selective"}),
    ("pp2 dp_shard2", {"schedule": "interleaved", "zero": 2}),
    ("pp2 tp2", {"sequence_parallel": True, "schedule": "zbv"}),
    ("cp2 tp2", {"sequence_parallel": True, "recompute": "full"}),
)
_MOE = (
    *("dp_replicate2", "dp_shard2", "cp2", "pp2 tp2", "cp2 tp2", "pp2 cp2"),
    *("dp_shard2 ep2", "cp2 ep2", "pp2", "tp2", "dp_shard4 ep2", "dp_shard4 ep4", "dp_replicate2 dp_shard2 ep2"),
    *("pp2 dp_shard2 ep2", "dp_shard2 tp2 ep2", "dp_shard2 cp2 ep2", "dp_shard2 cp2 ep4"),
    *("pp2 dp_shard4 ep2", "pp2 dp_shard2 tp2 ep2", "dp_shard2 cp2 tp2 ep2"),
)
_MOE_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tp2", {"sequence_parallel": True}),
    ("dp_replicate2 dp_shard2 tp2 ep2", {"fsdp.shard_threshold_numel": 600}),
    ("pp2", {"schedule": "zbv"}),
    ("pp2 dp_shard2 ep2", {"schedule": "interleaved"}),
)
_BERT_SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tp2", {"sequence_parallel": True}),
    ("pp2", {"schedule": "zbv"}),
    ("pp2 tp2", {"schedule": "interleaved", "sequence_parallel": True}),
)
_BERT = (
    "dp_replicate2",
    "dp_shard2",
    "tp2",
    "cp2",
    "pp2",
    "dp_shard2 tp2",
    "pp2 dp_shard2",
    "pp2 tp2",
    "cp2 tp2",
    "dp_shard2 cp2",
    "pp2 cp2",
    "dp_replicate2 dp_shard2",
    "pp2 dp_shard2 tp2",
)
_RESNET = ("dp_replicate2", "dp_shard2", "pp2", "dp_replicate2 dp_shard2", "pp2 dp_shard2", "pp4 dp_shard2")


def _cases() -> Iterator[Case]:
    for axes in (*_ALONE, *_FOUR, *_EIGHT):
        yield Case(model="gpt", axes=_axes(axes))
    for model, special in (("gpt", _GPT_SETTINGS), ("gpt-moe", _MOE_SETTINGS), ("bert", _BERT_SETTINGS)):
        for axes, settings in special:
            yield Case(model=model, axes=_axes(axes), settings=settings)
    for model, several in (("gpt-moe", _MOE), ("bert", _BERT), ("resnet", _RESNET)):
        for axes in several:
            yield Case(model=model, axes=_axes(axes))
    # one micro-batch: of several, the ranks together would have other samples in each than one process
    yield Case(model="resnet-batchnorm", axes=_axes("dp_replicate2"), settings={"micro_batch": 12})
    yield Case(model="resnet-batchnorm", axes=_axes("dp_replicate3"), settings={"micro_batch": 8})


CASES = tuple(_cases())

# what no model can do; ``parallel`` refuses more when it sees the model
REFUSED: tuple[tuple[dict[str, Any], int, str], ...] = (
    (
        {"pp": 2, "schedule": "zbv", "dp_shard": 2, "global_batch": 8, "micro_batch": 1},
        4,
        "zbv computes weight gradients after",
    ),
    ({"tp": 2, "compile": "regional"}, 2, "cannot be traced by the compiler"),
    ({"pp": 2, "compile": "model", "global_batch": 8, "micro_batch": 2}, 2, "cannot be traced by the compiler"),
    ({"cp": 2, "compile": "model"}, 2, "cannot be traced by the compiler"),
    ({"dp_shard": 4, "ep": 3, "global_batch": 8}, 4, "ep divides dp_shard x cp"),
    ({"dp_shard": 2, "ep": 2, "compile": "model"}, 2, "cannot be traced by the compiler"),
    ({"sequence_parallel": True}, 1, "it would change nothing"),
    ({"pp": 4, "global_batch": 8, "micro_batch": 4}, 4, "the schedule keeps 4 micro-batches in flight at once"),
    ({"pp": 2, "schedule": "interleaved", "global_batch": 9, "micro_batch": 3}, 2, "in groups of pp"),
    ({"dp_shard": 3, "global_batch": 8}, 3, "global_batch is a multiple of the ranks"),
    ({"tp": 2, "cp": 2}, 6, "the product of the mesh axes is the number of ranks"),
)


def page() -> str:
    """The page of what runs with what, from the cases that the tests run."""
    lines = [
        "# What runs with what",
        "",
        "Each row of the first table is a plan that is tested against one process, with tiny models and one thread per",
        f"process, over Gloo. {STEPS} steps with accumulation, clipping, samples of different length and tied embeddings have",
        "the losses of one process within 1e-5 and its gradient norms within 1e-4. The gradients of the first step, in float64,",
        "agree within 1e-5 per tensor.",
        "",
        "`python tests/support/matrix.py` writes this page from the test cases, and a test compares the two. `make test-full`",
        "runs every row.",
        "",
        "| model | processes | axes | other settings |",
        "|---|---|---|---|",
    ]
    for case in CASES:
        axes = " x ".join(f"{axis} {size}" for axis, size in case.axes.items())
        settings = ", ".join(f"{name}={value}" for name, value in case.settings.items())
        lines.append(f"| {case.model} | {case.ranks} | {axes} | {settings} |")
    lines += ["", "These plans are refused for every model:", "", "| settings | processes | reason |", "|---|---|---|"]
    for settings, ranks, _ in REFUSED:
        shown = ", ".join(f"{name}={value}" for name, value in settings.items())
        lines.append(f"| {shown} | {ranks} | {_reason(settings, ranks)} |")
    return "\n".join(lines) + "\n"


def _reason(settings: Mapping[str, Any], ranks: int) -> str:
    try:
        derive_plan(PlanOptions(**settings), world_size=ranks, device="cpu", native_bf16=False)
    except PlanError as error:
        return "; ".join(problem.rule for problem in error.problems)
    raise AssertionError(f"{settings} is legal")


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "what-runs.md").write_text(page())
