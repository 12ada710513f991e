"""LoRA by peft on a model of transformers: training, checkpoints, averages and export, with a frozen base."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from pool import Pool

from unisono.dist import JobSpec, World
from unisono.interop.huggingface import export
from unisono.parallel.deferred_init import deferred_init
from unisono.train.config import Components, RunConfig
from unisono.train.load import empty_model, open_run_checkpoint, read_model
from unisono.train.objectives import model_loss, next_token
from unisono.train.options import RunOptions
from unisono.train.whole_model import tensor_reader

peft = pytest.importorskip("peft", reason="NOT CHECKED: the extra 'dev' (peft) is not installed")


class Labelled(tiny.RaggedTokens):
    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = super().read(indices)
        return {"input_ids": batch["tokens"], "labels": np.where(batch["weights"] > 0, batch["tokens"], -100)}


def base() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def adapted() -> Any:
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # of transformers, about what peft calls
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")
        return peft.get_peft_model(base(), settings)


def train(world: World, run_dir: str, stop_after: int, changes: dict[str, Any]) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    own = {"data": Labelled(), "objective": model_loss} if "objective" not in changes else {}
    with tiny.trainer(run_dir, steps=4, world=world, network=adapted, lr=0.05, **own, **changes) as run:
        state = run.state
        optimized = [len(group["params"]) for group in state.optimizer.param_groups]
        losses = []
        for step in run:
            losses.append(step.loss)
            if step.index == stop_after:
                break
        run.save(wait=True)
        paths = sorted(state.global_state())
        return {"losses": losses, "digest": tiny.digest(run), "optimized": sum(optimized), "paths": paths}


def alone(folder: Path, stop_after: int = 4, **changes: Any) -> dict[str, Any]:
    return train(World(JobSpec()), str(folder), stop_after, changes)


def loaded(run_dir: Path) -> Any:
    config = RunConfig(components=Components(model=lambda run: adapted()), run=RunOptions(dir=str(run_dir)))
    return read_model(config, None, open_run_checkpoint(config, World(JobSpec()), None))


def plain_losses() -> list[float]:
    """Whole batches by peft, transformers and torch alone, with the run's schedule and clipping."""
    from unisono.data.order.permutation import Permutation

    model, data = adapted(), Labelled()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
    order, losses = Permutation(len(data), seed=0), []
    for step in range(4):
        batch = {k: torch.from_numpy(v) for k, v in data.read(order(np.arange(8 * step, 8 * step + 8))).items()}
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        warm = (step + 1) / 2 if step < 2 else 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 2) / 2))
        optimizer.param_groups[0]["lr"] = 0.05 * warm
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_it_trains_the_adapter_alone_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = alone(tmp_path / "whole", micro_batch=3, ema_decay=0.5)
    assert whole["losses"] == pytest.approx(plain_losses(), rel=1e-4)
    assert whole["optimized"] == 8  # A and B of two matrices in two layers
    states = [path for path in whole["paths"] if path.startswith(("optim/", "ema/"))]
    assert len(states) == 8 * 4  # three tensors of Adam, and the average
    assert all("lora_" in path for path in states)
    first = alone(tmp_path / "run", 2, micro_batch=3, ema_decay=0.5)
    then = alone(tmp_path / "run", 4, micro_batch=3, ema_decay=0.5)
    assert first["losses"] + then["losses"] == whole["losses"]
    assert then["digest"] == whole["digest"]
    model, frozen = loaded(tmp_path / "run"), base().state_dict()
    for name, tensor in model.get_base_model().state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, frozen[name.replace(".base_layer", "")]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"dp_shard": 2, "ema_decay": 0.5},
        *(
            pytest.param(changes, marks=pytest.mark.full)
            for changes in ({"dp_shard": 2, "zero": 1}, {"micro_batch": 1})
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # by peft, of transformers
def test_two_ranks_give_the_adapter_of_one(tmp_path: Path, pool: Pool, changes: dict[str, Any]) -> None:
    changes = {"micro_batch": 2, **changes}
    expected = alone(tmp_path / "alone", ema_decay=changes.get("ema_decay", 0.0))
    for found in pool.run(train, str(tmp_path / "run"), 4, changes, ranks=2):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    how = {"max_length": 16, "end_of_document": None, "tokenizer": None}
    export(loaded(tmp_path / "run"), tmp_path / "out", **how)
    export(loaded(tmp_path / "alone"), tmp_path / "expected", **how)
    tokens = torch.arange(12)[None]
    opened = [peft.PeftModel.from_pretrained(base(), tmp_path / name).eval() for name in ("out", "expected")]
    with torch.no_grad():
        found, wanted = (model(tokens).logits for model in opened)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        assert (wanted - base().eval()(tokens).logits).abs().max() > 1e-2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_export_reads_the_adapter_alone(tmp_path: Path) -> None:
    """As ``unisono checkpoint export`` and the end of a sharded run do, from a model without values."""
    alone(tmp_path / "run", 2)
    config = RunConfig(components=Components(model=lambda run: adapted()), run=RunOptions(dir=str(tmp_path / "run")))
    snapshot = open_run_checkpoint(config, World(JobSpec()), None)
    empty, how = empty_model(config, None), {"max_length": 16, "end_of_document": None, "tokenizer": None}
    export(empty, tmp_path / "read", read=tensor_reader(empty, snapshot), **how)
    export(read_model(config, None, snapshot), tmp_path / "whole", **how)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "read" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_peft_builds_without_values() -> None:
    deferred, plain = deferred_init(adapted), adapted()  # both seed
    named = dict(deferred.model.named_parameters())
    assert all(parameter.is_meta for parameter in named.values())
    drawn = {name: value.clone() for name, value in deferred.values(named.keys())}
    assert drawn.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(drawn[name], parameter), name
        assert named[name].requires_grad == parameter.requires_grad, name


def test_the_built_in_objective_on_token_windows(tmp_path: Path) -> None:
    losses = alone(tmp_path / "run", objective=next_token)["losses"]
    assert losses[-1] < losses[0]
