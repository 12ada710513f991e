"""``unisono prune``: the folder of a smaller model, which every command reads, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from commands import Desk

from unisono.cli.common import load_run
from unisono.train.build import find_tokenizer
from unisono.train.load import open_run_checkpoint, read_model

WIDER = ("--set=model.num_layers=2", "--set=model.num_heads=4", "--set=model.num_kv_heads=2", "--set=model.dim=32")


@pytest.fixture(scope="module")
def source(shared_desk: Desk) -> Path:
    """A finished run of two layers, to be read only."""
    run_dir = shared_desk.folder / "wide"
    done = shared_desk.train(
        run_dir, *WIDER, "--set=train.steps=40", "--set=optim.lr=0.01", "--set=train.eval_every_steps=0"
    )
    assert done.code == 0, done.err
    return run_dir


def evaluated(desk: Desk, run_dir: Path) -> float:
    return desk.here("eval", str(run_dir), "--json").json["evaluation"]["loss"]


def test_a_smaller_model(desk: Desk, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--heads", "0.5", "--ffn", "0.25", "--layers", "1", "--sensitivity")
    done = desk.here("prune", str(source), "--out", str(out), *options, "--json")
    assert done.code == 0, done.err
    found = done.json
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_dim": 72}
    assert found["sizes"] == sizes
    assert len(found["removed_layers"]) == 1
    assert list(found["kept_heads"].values()) in ([[0, 1]], [[2, 3]])  # a key/value head with its two query heads
    before, after = found["figures"]["before"], found["figures"]["after"]
    assert after["stored_bytes"] < 0.7 * before["stored_bytes"]
    assert (out / "export/model.safetensors").stat().st_size == after["stored_bytes"]
    config = load_run(str(out)).value.model
    assert {name: getattr(config, name) for name in sizes} == sizes
    assert evaluated(desk, out) == pytest.approx(after["evaluation"]["loss"], rel=1e-6)
    rows = found["sensitivity"]
    assert sorted((row["block"], row["removed"]) for row in rows) == [
        (f"blocks.{number}", kind) for number in range(2) for kind in ("ffn", "heads", "layer")
    ]
    assert [row["loss"] for row in rows] == sorted((row["loss"] for row in rows), reverse=True)
    assert json.loads((out / "compression.json").read_text())["sizes"] == sizes
    assert desk.here("generate", str(out)).code == 0
    again = tmp_path / "export"
    assert desk.here("checkpoint", "export", str(out), str(again)).code == 0
    assert (again / "model.safetensors").read_bytes() == (out / "export/model.safetensors").read_bytes()
    # deterministic
    done = desk.here("prune", str(source), "--out", str(tmp_path / "twice"), *options, "--json")
    assert (tmp_path / "twice/export/model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


def test_a_run_with_the_configuration_starts_with_the_weights(
    desk: Desk, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, new = tmp_path / "out", tmp_path / "new"
    done = desk.here("prune", str(source), "--out", str(out), "--ffn=0.25", "--json")
    loss = done.json["figures"]["after"]["evaluation"]["loss"]
    assert desk.here("train", str(out / "config.toml")).code != 0
    told = capfd.readouterr().err
    assert f"run.dir {str(out)!r}, the folder of a compressed model" in told
    assert f"--set model.weights={out} --set run.dir=NEW" in told
    steps = ("--set=train.steps=1", "--set=optim.lr=1e-9", f"--set=run.dir={new}")
    assert desk.here("train", str(out / "config.toml"), *steps).code == 0
    assert evaluated(desk, new) == pytest.approx(loss, rel=1e-5)


def test_the_export_gives_the_same_logits_with_transformers(desk: Desk, source: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    out = tmp_path / "out"
    assert desk.here("prune", str(source), "--out", str(out), "--heads=0.5", "--ffn=0.5").code == 0
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(out / "export", output_loading_info=True)
    assert not any(loading.values())
    assert theirs.config.head_dim * theirs.config.num_attention_heads == theirs.config.hidden_size // 2
    config = load_run(str(out)).value
    tokenizer = find_tokenizer(config)
    from unisono.dist import JobSpec, World

    snapshot = open_run_checkpoint(config, World.alone(JobSpec()), None)
    ours = read_model(config, tokenizer, snapshot).eval()
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        assert torch.allclose(ours(tokens).logits(), theirs.eval()(tokens).logits, rtol=0, atol=1e-5)


def test_a_hugging_face_folder(desk: Desk, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=320, intermediate_size=48))
    theirs.save_pretrained(tmp_path / "theirs")
    given = [each for each in desk.settings if each.startswith(("--set=data.", "--set=plan."))]
    out = tmp_path / "out"
    done = desk.here(
        "prune", str(tmp_path / "theirs"), "--out", str(out), "--heads=0.5", "--layers=1", *given, "--json"
    )
    assert done.code == 0, done.err
    loss = done.json["figures"]["after"]["evaluation"]["loss"]
    shutil.rmtree(tmp_path / "theirs")  # the result has all that it needs
    assert evaluated(desk, out) == pytest.approx(loss, rel=1e-6)
    smaller = transformers.AutoModelForCausalLM.from_pretrained(out / "export")
    assert (smaller.config.num_attention_heads, smaller.config.num_hidden_layers, smaller.config.head_dim) == (2, 1, 8)
    tuned = desk.here("train", str(out / "config.toml"), f"--set=run.dir={tmp_path / 'tuned'}", "--set=train.steps=2")
    assert tuned.code == 0, tuned.err


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft's use of transformers
def test_adapters_are_refused(desk: Desk, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    pytest.importorskip("peft", reason="NOT CHECKED: the extra 'lora' (peft) is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=320)).save_pretrained(
        tmp_path / "theirs"
    )
    given = [each for each in desk.settings if each.startswith(("--set=data.", "--set=plan."))]
    for option in ("--ffn=0.5", "--sparsity=0.5"):
        done = desk.here(
            "prune", str(tmp_path / "theirs"), "--out", str(tmp_path / "out"), option, *given, "--set=lora.rank=2"
        )
        assert done.code == 2
        assert "a model with adapters, lora.rank 2" in done.err


def test_zeros_keep_the_shapes(desk: Desk, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = desk.here("prune", str(source), "--out", str(out), "--pattern=2:4", "--skip=blocks.0.*")
    assert done.code == 0, done.err
    assert "zeros make no pass faster by themselves" in done.out
    assert "smaller: no" in done.out
    assert load_run(str(out)).value.model.weights == str(out)
    before, after = (safetensors.torch.load_file(each / "export/model.safetensors") for each in (source, out))
    assert {name: tensor.shape for name, tensor in before.items()} == {name: t.shape for name, t in after.items()}
    zeros = {name for name, tensor in after.items() if bool((tensor == 0).any())}
    assert zeros
    assert all(name.startswith("model.layers.1.") for name in zeros)
    card = (out / "export/README.md").read_text()
    assert "zip_bytes" in card
    assert "no pass faster" in card


def test_fewer_heads_and_units_and_zeros_in_one_command(desk: Desk, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--heads=0.5", "--ffn=0.25", "--pattern=2:4")
    done = desk.here("prune", str(source), "--out", str(out), *options, "--json")
    assert done.code == 0, done.err
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_dim": 72}
    config = load_run(str(out)).value.model
    assert {name: getattr(config, name) for name in sizes} == sizes
    weights = safetensors.torch.load_file(out / "export/model.safetensors")
    pruned = [weight for name, weight in weights.items() if "_proj" in name]
    assert len(pruned) == 14  # seven matrices of each block
    for weight in pruned:
        assert (weight.unflatten(-1, (-1, 4)).count_nonzero(-1) == 2).all()
    assert evaluated(desk, out) == pytest.approx(done.json["figures"]["after"]["evaluation"]["loss"], rel=1e-6)


def test_a_model_that_got_too_bad_is_not_written(desk: Desk, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--ffn=0.9", "--heads=0.5", "--layers=1", "--criterion=magnitude")
    done = desk.here("prune", str(source), "--out", str(out), *options, "--max-drop=0", "--json")
    assert (done.code, done.json["ok"], done.json["out"]) == (1, False, None)
    assert done.json["drop"] > 0
    assert not list(tmp_path.iterdir())
    told = desk.here("prune", str(source), "--out", str(out), *options, "--max-drop=0.001")
    assert told.code == 1
    assert "refused: loss is" in told.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing to prune"),
        (["--ffn=0"], "nothing to prune"),
        (["--layers=2"], "--layers 1"),
        (["--heads=0.1"], "--heads 0.5"),
        (["--ffn=0.001"], "at least one is removed"),
        (["--pattern=2:4", "--sparsity=0.3"], "two of each four"),
        (["--sparsity=0.5", "--sensitivity"], "--ffn 0.25 --sensitivity"),
        (["--ffn=0.5", "--skip=blocks.0"], "prune all blocks alike"),
        (["--sparsity=0.5", "--skip=bricks*"], "--skip bricks*"),
        (["--layers=1", "--skip=blocks.*"], "of which 2 stay"),
        (
            ["--ffn=0.5", "--criterion=magnitude", "--calibration-samples=7"],
            "magnitude compares weights, and reads no samples",
        ),
    ],
)
def test_refusals(desk: Desk, source: Path, tmp_path: Path, options: list[str], said: str) -> None:
    done = desk.here("prune", str(source), "--out", str(tmp_path / "out"), *options)
    assert done.code == 2
    assert said in done.err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left(desk: Desk, source: Path, tmp_path: Path) -> None:
    done = desk.here("prune", str(source), "--out", str(tmp_path), "--ffn=0.5")
    assert done.code == 2
    assert "--out" in done.err
    assert not list(tmp_path.iterdir())


def test_a_quantized_model_is_refused(desk: Desk, source: Path, tmp_path: Path) -> None:
    assert desk.here("quantize", str(source), "--scheme=int8", "--out", str(tmp_path / "int8")).code == 0
    for options in ("--ffn=0.5", "--sparsity=0.5"):
        done = desk.here("prune", str(tmp_path / "int8"), "--out", str(tmp_path / "out"), options)
        assert done.code == 2
        assert "prune the model that it was made from" in done.err
    pruned = tmp_path / "pruned"  # the other order
    assert desk.here("prune", str(source), "--out", str(pruned), "--ffn=0.25").code == 0
    both = tmp_path / "both"
    done = desk.here("quantize", str(pruned), "--scheme=int8", "--out", str(both), "--json")
    assert done.code == 0, done.err
    before, after = (done.json["figures"][when] for when in ("before", "after"))
    assert evaluated(desk, pruned) == before["evaluation"]["loss"]
    assert evaluated(desk, both) == after["evaluation"]["loss"]
    assert after["evaluation"]["loss"] == pytest.approx(before["evaluation"]["loss"], rel=0.02)
    assert after["stored_bytes"] < 0.7 * before["stored_bytes"]
    assert load_run(str(both)).value.model.ffn_dim == load_run(str(pruned)).value.model.ffn_dim == 72


def test_layers_of_skip_stay(desk: Desk, source: Path, tmp_path: Path) -> None:
    for number in range(2):
        given = ("--layers=1", f"--skip=blocks.{number}", "--json")
        done = desk.here("prune", str(source), "--out", str(tmp_path / str(number)), *given)
        assert done.json["removed_layers"] == [1 - number]


@pytest.mark.full
def test_fine_tuning_recovers_the_loss(desk: Desk, tmp_path: Path) -> None:
    """Pruned weights are a better start than drawn ones, for the same number of steps."""
    longer = ("--set=train.steps=150", "--set=optim.lr=0.01", "--set=train.num_eval_samples=0", "--set=data.seq_len=32")
    assert desk.train(tmp_path / "run", *WIDER, *longer).code == 0
    out = tmp_path / "out"
    done = desk.here("prune", str(tmp_path / "run"), "--out", str(out), "--ffn=0.5", "--heads=0.5", "--json")
    pruned = done.json["figures"]["after"]["evaluation"]["loss"]
    losses: list[float] = []
    for name, start in (("tuned", f"--set=model.weights={out}"), ("drawn", "--set=model.weights=")):
        settings = (f"--set=run.dir={tmp_path / name}", "--set=train.steps=30", start)
        trained = desk.here("train", str(out / "config.toml"), *settings)
        assert trained.code == 0, trained.err
        losses.append(evaluated(desk, tmp_path / name))
    tuned, drawn = losses
    assert tuned < pruned
    assert tuned < drawn
