"""Models that are not ours, from raw text to ``from_pretrained``: tied ones, and those of transformers, also sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from commands import Desk, losses_of

FILE = """
import torch
from unisono import Components, RunConfig


class Block(torch.nn.Linear):
    def forward(self, hidden):
        return hidden + torch.tanh(super().forward(hidden))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(257, 16)
        self.blocks = torch.nn.ModuleList([Block(16, 16), Block(16, 16)])
        self.head = torch.nn.Linear(16, 257, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def llama(run):
    import transformers

    sizes = dict(vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def config():
    return RunConfig(components=Components(model=MODEL))
"""
MODELS = {"tied": "lambda run: Tied()", "llama": "llama"}


@pytest.mark.parametrize(
    ("model", "axis"),
    [
        ("tied", ""),
        ("llama", ""),
        *(pytest.param(model, axis, marks=pytest.mark.full) for model, axis in (("tied", "dp_shard"), ("tied", "pp"))),
        *(pytest.param("llama", axis, marks=pytest.mark.full) for axis in ("dp_shard", "tp", "pp", "cp")),
    ],
)
def test_train_eval_and_export(desk: Desk, tmp_path: Path, model: str, axis: str) -> None:
    if model == "llama":
        pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")
    path, run_dir = tmp_path / "own.py", tmp_path / "run"
    path.write_text(FILE.replace("MODEL", MODELS[model]))
    small = [each for each in desk.settings if not each.startswith("--set=model.")]
    sharded = (
        [f"--set=plan.{axis}=2", "--set=plan.micro_batch=2", "--set=launch.num_processes=2"] if axis else ["--debug"]
    )
    done = (desk.process if axis else desk.here)(
        "train", str(path), *small, f"--set=run.dir={run_dir}", *sharded, "--json"
    )
    assert done.code == 0, done.err
    evaluated = desk.here("eval", str(run_dir), "--samples=4", "--json")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json["evaluation"] == pytest.approx(done.json["evaluation"], rel=1e-5)
    exported = desk.here("checkpoint", "export", str(run_dir), str(tmp_path / "out"))
    assert exported.code == 0, exported.err
    written = (tmp_path / "out/model.safetensors").read_bytes()
    assert (run_dir / "export/model.safetensors").read_bytes() == written
    assert losses_of(run_dir)[-1] < losses_of(run_dir)[0]
    opened = reopened(model, tmp_path / "out", path)
    logits: Any = opened(torch.arange(8)[None])
    assert torch.isfinite(getattr(logits, "logits", logits)).all()


def reopened(model: str, folder: Path, path: Path) -> Any:
    if model == "llama":
        import transformers

        opened, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(loading.values()), loading
        assert opened.lm_head.weight is opened.model.embed_tokens.weight
        return opened
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    opened = names["Tied"]()
    safetensors.torch.load_model(opened, folder / "model.safetensors")
    return opened
