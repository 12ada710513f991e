"""What is removed from a model has no effect on the rest: the smaller model computes what the whole one does with it masked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import make_desk
from PIL import Image
from torch import nn

from unisono.compress.pruning import prune
from unisono.compress.scores import Criterion, unit_scores, without_block
from unisono.compress.smaller import Kept, Removal, choose, masked_copy, smaller_model
from unisono.config import Resolved, load_config
from unisono.dist import JobSpec, World
from unisono.errors import ConfigError
from unisono.train.build import resolve_run
from unisono.train.config import RunConfig
from unisono.train.trained import TrainedRun, trained_run

SIZES = ("model.num_layers=3", "model.dim=32", "model.num_heads=8", "model.num_kv_heads=2", "data.seq_len=16")
COMMON = ("plan.global_batch=8", "plan.precision=fp32")
Opened = tuple[TrainedRun, Resolved[RunConfig]]


def shaken(model: nn.Module) -> None:
    """No two units alike, none without effect, and no statistic at its start."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.rand_like(tensor) if name.endswith("running_var") else torch.randn_like(tensor)
            tensor.add_(noise * (0.3 if tensor.dim() < 2 else tensor.abs().mean()))


@contextmanager
def opened(*settings: str) -> Generator[Opened]:
    resolved = load_config(RunConfig, overrides=[*settings, *COMMON])
    resolved = resolve_run(resolved, World.alone(JobSpec()))
    with trained_run(resolved.value, None, held_out_only=False, untrained=True) as run:
        torch.manual_seed(1)
        shaken(run.model)
        yield run, resolved


@pytest.fixture
def text(tmp_path: Path) -> tuple[str, str]:
    return f"data.corpus={make_desk(tmp_path, tmp_path).folder / 'corpus'}", f"data.cache_dir={tmp_path / 'cache'}"


def removal(**given: Any) -> Removal:
    defaults: dict[str, Any] = {
        "heads": 0.0,
        "ffn": 0.0,
        "layers": 0,
        "criterion": "activation",
        "samples": 8,
        "skip": (),
    }
    return Removal(**defaults | given)


def outputs(run: TrainedRun, model: nn.Module) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def keep(_number: int, result: Any, _batch: Any) -> None:
        result = result.logits if hasattr(result, "logits") else result
        found.append(result() if isinstance(result, Callable) else result)

    with torch.no_grad():
        run.forward_backward(model.eval()).evaluate([run.held_out_batch()], keep)
    return found[0]


def check_smaller(run: TrainedRun, resolved: Resolved[RunConfig], asked: Removal) -> tuple[nn.Module, dict[str, Any]]:
    """The smaller model, which computes what the masked whole one does, and its sizes."""
    before = outputs(run, run.model)
    kept = choose(run, run.model, asked)
    made, _, sizes = smaller_model(run, resolved, kept)
    masked = masked_copy(run.model, kept.units)
    removed = sorted(set(range(len(kept.blocks))) - set(kept.layers))
    expected = _without_blocks(run, masked, kept, removed)
    found = outputs(run, made)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max())), (
        (found - expected).abs().max()
    )
    assert not torch.allclose(found, before, rtol=0, atol=1e-3 * float(before.abs().max()))
    assert torch.equal(outputs(run, run.model), before)  # the model of the run is left as it was
    count = sum(parameter.numel() for parameter in made.parameters())
    assert count < sum(parameter.numel() for parameter in run.model.parameters())
    return made, sizes


def _without_blocks(run: TrainedRun, model: nn.Module, kept: Kept, removed: list[int]) -> torch.Tensor:
    if not removed:
        return outputs(run, model)
    with without_block(model, kept.blocks[removed[0]]):
        return _without_blocks(run, model, kept, removed[1:])


@pytest.mark.parametrize("criterion", ["magnitude", "activation", "taylor"])
def test_a_gpt(text: tuple[str, ...], criterion: Criterion) -> None:
    with opened(*text, *SIZES) as (run, resolved):
        made, sizes = check_smaller(run, resolved, removal(heads=0.5, ffn=0.25, layers=1, criterion=criterion))
    expected = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 1, "head_dim": 4, "ffn_dim": 72}
    assert sizes == expected
    assert made.blocks[0].attention.k.weight.shape == (4, 32)


def test_query_heads_of_each_group(text: tuple[str, ...]) -> None:
    with opened(*text, *SIZES) as (run, resolved):
        made, sizes = check_smaller(run, resolved, removal(heads=0.25))
        assert (sizes["num_heads"], sizes["num_kv_heads"]) == (6, 2)
        assert made.blocks[0].attention.k.weight.shape == (8, 32)
        with pytest.raises(ConfigError, match=r"--heads 0\.25"):
            choose(run, run.model, removal(heads=0.1))


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_kept_heads_are_numbers_of_query_heads(text: tuple[str, ...], tmp_path: Path, fraction: float) -> None:
    with opened(*text, *SIZES) as (run, resolved):
        found = prune(
            run, resolved, removal=removal(heads=fraction), sparsity=None, sensitivity_samples=None, out=tmp_path
        )
        for block, heads in found.record["kept_heads"].items():
            name = f"{block}.attention.q.weight"
            assert len(heads) == 8 * (1 - fraction)
            before = run.model.get_parameter(name).reshape(8, 4, 32)
            assert torch.equal(found.model.get_parameter(name), before[heads].flatten(0, 1))
    assert list(found.record["kept_heads"]) == [f"blocks.{number}" for number in range(3)]


@pytest.mark.parametrize("criterion", ["magnitude", "activation", "taylor"])
def test_experts_lose_units_of_their_own(text: tuple[str, ...], criterion: Criterion) -> None:
    experts = ("components.model=moe", "model.num_experts=4", "model.ffn_dim=16")
    with opened(*text, *SIZES, *experts) as (run, resolved):
        made, sizes = check_smaller(run, resolved, removal(ffn=0.5, heads=0.5, criterion=criterion))
        kept = choose(run, run.model, removal(ffn=0.5, criterion=criterion))
    assert sizes["ffn_dim"] == 8
    assert made.blocks[0].ffn.experts.down.shape == (4, 32, 8)
    columns = kept.units[0][1]
    assert len({tuple(row.tolist()) for row in columns}) > 1


def test_a_bert(text: tuple[str, ...]) -> None:
    settings = ("task.kind=masked_language_model", *(each for each in SIZES if "kv" not in each))
    with opened(*text, *settings) as (run, resolved):
        _, sizes = check_smaller(run, resolved, removal(ffn=0.5, layers=1))
        assert sizes == {"num_layers": 2, "ffn_dim": 64}
        with pytest.raises(ConfigError, match="no width of a head"):
            choose(run, run.model, removal(heads=0.5))


@pytest.mark.parametrize("criterion", ["activation", "taylor"])
def test_a_resnet(tmp_path: Path, criterion: Criterion) -> None:
    for number in range(24):
        folder = tmp_path / "images" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    settings = ("task.kind=image", f"data.train={tmp_path / 'images'}", "image.size=16", "components.model=resnet14")
    with opened(*settings, f"data.cache_dir={tmp_path / 'cache'}") as (run, resolved):
        made, sizes = check_smaller(run, resolved, removal(ffn=0.3, criterion=criterion))
        assert sizes == {"ffn_dim": 45}
        assert made.blocks[0].conv2.weight.shape == (45, 45, 3, 3)
        found = prune(
            run, resolved, removal=removal(ffn=0.3), sparsity=None, sensitivity_samples=8, out=tmp_path / "out"
        )
        assert found.what == "pruned: 30% of inner channels"
        assert found.lines[:2] == [
            "new sizes: ffn_dim (inner channels) 45",
            "held-out loss when only this block is pruned; activation chose what is removed, not this table:",
        ]
        assert all(line.endswith("  inner channels") for line in found.lines[2:])
        for kind in ("heads", "layers"):
            with pytest.raises(ConfigError, match="ResNet"):
                choose(run, run.model, removal(**{kind: 1 if kind == "layers" else 0.5}))


def test_a_table_net(tmp_path: Path) -> None:
    rows = [f"{n % 7},{n % 3},{'ab'[n % 2]}" for n in range(64)]
    (tmp_path / "rows.csv").write_text("\n".join(["x,y,kind", *rows]) + "\n")
    settings = ("task.kind=table", f"data.train={tmp_path / 'rows.csv'}", "task.target=kind", "model.dim=16")
    with opened(*settings, f"data.cache_dir={tmp_path / 'cache'}") as (run, resolved):
        _, sizes = check_smaller(run, resolved, removal(layers=2))
        assert sizes == {"num_layers": 2}
        with pytest.raises(ConfigError, match="twice the width"):
            choose(run, run.model, removal(ffn=0.5))


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_models_of_transformers_like_llama(tmp_path: Path, text: tuple[str, ...], kind: str) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, vocab_size=320, intermediate_size=48, max_position_embeddings=64, head_dim=8
    )
    folder = tmp_path / "theirs"
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    with opened(*text, f"model.pretrained={folder}", "data.seq_len=16") as (run, resolved):
        made, found = check_smaller(run, resolved, removal(heads=0.5, ffn=0.25, layers=1))
        assert (found["num_attention_heads"], found["num_key_value_heads"], found["head_dim"]) == (2, 1, 8)
        expected = outputs(run, made)
        made.save_pretrained(tmp_path / "smaller")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")
        assert type(again) is type(run.model)
        assert torch.allclose(outputs(run, again), expected, rtol=0, atol=1e-6)


def test_a_bert_of_transformers(tmp_path: Path, text: tuple[str, ...]) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=320)).save_pretrained(tmp_path / "theirs")
    settings = ("task.kind=masked_language_model", f"model.pretrained={tmp_path / 'theirs'}", "data.seq_len=16")
    with opened(*text, *settings) as (run, resolved):
        _, found = check_smaller(run, resolved, removal(ffn=0.5, layers=1))
    assert found == {"num_hidden_layers": 1, "intermediate_size": 24}


def test_a_class_that_is_not_known(tmp_path: Path, text: tuple[str, ...]) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    ).save_pretrained(tmp_path / "theirs")
    with (
        opened(*text, f"model.pretrained={tmp_path / 'theirs'}", "data.seq_len=16") as (run, _),
        pytest.raises(ConfigError, match="GPT2LMHeadModel") as raised,
    ):
        choose(run, run.model, removal(ffn=0.5))
    assert "llama, mistral, qwen2, qwen3, bert, roberta" in str(raised.value)


@pytest.mark.parametrize("criterion", ["magnitude", "activation", "taylor"])
@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_a_unit_without_effect_goes_first(text: tuple[str, ...], criterion: Criterion, model: str) -> None:
    sizes = (*SIZES, f"components.model={model}", "model.ffn_dim=16")
    with opened(*text, *sizes) as (run, _), torch.no_grad():
        block: Any = run.model.blocks[1]
        block.attention.out.weight[:, 8:12] = 0  # head 2
        block.attention.q.weight[8:12] = 0
        down = block.ffn.experts.down if model == "moe" else block.ffn.down.weight
        layers = [block.ffn.experts.gate, block.ffn.experts.up] if model == "moe" else [block.ffn.gate.weight]
        down[..., 5] = 0
        for layer in layers:
            layer[..., 5, :] = 0
        if model == "gpt":
            block.ffn.up.weight[5] = 0
        kept = choose(run, run.model, removal(heads=0.25, ffn=1 / 16, criterion=criterion))
        again = choose(run, run.model, removal(heads=0.25, ffn=1 / 16, criterion=criterion))
    (_, heads), (_, hidden) = kept.of_block("blocks.1", "heads") + kept.of_block("blocks.1", "ffn")
    assert 2 not in heads[0].tolist()
    assert all(5 not in row for row in hidden.tolist())
    for (_, first), (_, second) in zip(kept.units, again.units, strict=True):
        assert torch.equal(first, second)


def test_equal_units_go_by_their_number(text: tuple[str, ...]) -> None:
    with opened(*text, *SIZES) as (run, _):
        model = copy.deepcopy(run.model)
        for parameter in model.parameters():
            parameter.data.fill_(0.1)
        kept = choose(run, model, removal(ffn=0.5, criterion="magnitude"))
    assert kept.units[0][1].tolist() == [list(range(48, 96))]


def test_taylor_is_the_gradient_of_a_gate(text: tuple[str, ...]) -> None:
    """|Σ activation · gradient| of a unit is the derivative of the loss by a factor on the unit."""
    with opened(*text, *SIZES) as (run, _):
        kept = choose(run, run.model, removal(ffn=0.5))
        units = kept.units[0][0]
        (scores,) = unit_scores(run, run.model, [units], "taylor", 1)
        gate = torch.ones(units.units_per_group, requires_grad=True)
        down: Any = run.model.get_submodule(units.consumer.name.removesuffix(".weight"))
        handle = down.register_forward_pre_hook(lambda _layer, inputs: (inputs[0] * gate,))

        def backward(_number: int, result: Any, batch: Any) -> None:
            loss, weight = run.objective(result, batch)
            assert isinstance(loss, torch.Tensor)
            (loss / weight).backward()

        run.forward_backward(run.model).evaluate(list(run.training_batches(1)), backward)
        handle.remove()
    assert gate.grad is not None
    assert torch.allclose(scores[0].float(), gate.grad.abs(), rtol=1e-3, atol=1e-7)
