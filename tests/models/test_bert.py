"""The reference encoder: what it sees, what it predicts, its initialisation, Hugging Face's layout, and that it learns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from unisono import OptimOptions, PlanOptions, Trainer, TrainOptions
from unisono.data import MaskTokens, from_map_style
from unisono.errors import CheckpointError, ConfigError, DataError
from unisono.interop.bert import load_bert
from unisono.interop.huggingface import export
from unisono.models.bert import BERT, BertOptions
from unisono.train.objectives import masked_token

SMALL = {"vocab_size": 60, "num_layers": 2, "dim": 24, "num_heads": 3, "ffn_dim": 40, "max_length": 20, "dropout": 0.0}


def build(**changes: object) -> BERT:
    torch.manual_seed(0)
    return BERT(BertOptions(**{**SMALL, **changes}))


def stirred(model: BERT) -> BERT:
    """Away from initialisation, where norms are 1, biases 0 and a swapped pair of matrices would hardly show."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def test_every_token_sees_every_real_token_and_no_filling() -> None:
    model = stirred(build())
    tokens = torch.randint(0, 60, (2, 12))
    padding = torch.arange(12) < torch.tensor([[8], [12]])
    whole = model(tokens, padding).logits()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 60
    after = model(changed, padding).logits()
    torch.testing.assert_close(after[0, :8], whole[0, :8], rtol=0, atol=1e-6)  # of the first text 9 is filling
    assert ((after[1] - whole[1]).abs().amax(-1) > 1e-4).all()
    alone = model(tokens[:1, :8]).logits()
    torch.testing.assert_close(whole[:1, :8], alone, rtol=0, atol=1e-5)
    kinds = torch.zeros(2, 12, dtype=torch.int64)
    torch.testing.assert_close(model(tokens, padding, kinds).logits(), whole)
    assert (model(tokens, padding, kinds + 1).logits() - whole).abs().max() > 1e-2


def test_of_an_empty_text_everything_is_seen() -> None:
    model = stirred(build())
    tokens = torch.randint(0, 60, (2, 6))
    padding = torch.tensor([[True] * 6, [False] * 6])
    both = model(tokens, padding).logits()
    torch.testing.assert_close(both, model(tokens).logits(), rtol=0, atol=1e-5)


def test_only_the_places_asked_for_are_multiplied_out() -> None:
    model = stirred(build())
    tokens, places = torch.randint(0, 60, (2, 12)), torch.tensor([[3, 7, 0], [11, 2, 2]])
    head = model(tokens, predicted=places)
    assert head.hidden.shape[:2] == (2, 3)
    whole = model(tokens).logits()
    torch.testing.assert_close(head.logits(), torch.stack([whole[0, places[0]], whole[1, places[1]]]))


def test_loss_and_gradients_are_those_of_the_plain_formula() -> None:
    model = stirred(build())
    tokens, places = torch.randint(0, 60, (2, 12)), torch.tensor([[3, 7], [11, 0]])
    batch = {"targets": torch.randint(0, 60, (2, 2)), "weights": torch.tensor([[1.0, 1.0], [1.0, 0.0]])}
    loss, weight = masked_token(model(tokens, predicted=places), batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    head = model(tokens, predicted=places)
    plain = torch.nn.functional.linear(head.hidden[..., :24], model.embedding.weight, model.head.bias)
    each = torch.nn.functional.cross_entropy(plain.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    expected = (each * batch["weights"].flatten()).sum()
    expected.backward()
    assert weight == 3
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert found["head.bias"].abs().max() > 0.1


def test_initialisation_is_the_documented_one() -> None:
    model = build(dim=192, num_heads=3, vocab_size=1000, ffn_dim=768)
    assert model.blocks[0].ffn.down.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.03)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == float(name.endswith("norm.weight"))).all(), name


def test_what_cannot_be_built_or_read() -> None:
    with pytest.raises(ConfigError) as caught:
        build(num_heads=5)
    assert str(caught.value) == (
        "num_heads 5 with dim 24\n  rule: dim is divisible by num_heads\n"
        "  so:   the attention cannot be built\n  try:  num_heads=4"
    )
    with pytest.raises(DataError, match="texts of 21 tokens for a model of max_length 20"):
        build()(torch.zeros(1, 21, dtype=torch.int64))


# --- Hugging Face --------------------------------------------------------------------------------------------------


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed")


def same_logits(ours: BERT, theirs: torch.nn.Module) -> None:
    tokens, kinds = torch.randint(0, 60, (3, 16)), torch.randint(0, 2, (3, 16))
    padding = torch.arange(16) < torch.tensor([[16], [9], [4]])
    with torch.no_grad():
        mine = ours.eval()(tokens, padding, kinds).logits()
        other = theirs.eval()(tokens, attention_mask=padding.long(), token_type_ids=kinds).logits
    assert mine.abs().max() > 1
    difference = (mine - other)[padding].abs().max()
    assert difference < 1e-4, difference


def test_an_export_opens_as_bert_for_masked_lm_and_gives_the_same_logits(transformers, tmp_path: Path) -> None:
    model = stirred(build(norm_eps=1e-5))
    folder = export(model, tmp_path / "out", max_length=16, end_of_document=None, tokenizer=None)
    theirs, loading = transformers.BertForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    same_logits(model, theirs)
    again = load_bert(folder)
    assert again.options == model.options
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def test_weights_of_bert_for_masked_lm_load_and_give_the_same_logits(transformers, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=20,
    )
    theirs = transformers.BertForMaskedLM(config)
    stirred(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    before = torch.get_rng_state()
    model = load_bert(tmp_path / "theirs")
    assert torch.equal(before, torch.get_rng_state())
    assert model.options.dropout == 0.1
    same_logits(model, theirs)
    # as published in 2018: other names for norms, more heads
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    old = {k.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): v for k, v in tensors.items()}
    old["bert.pooler.dense.bias"] = torch.zeros(24)
    safetensors.torch.save_file(old, path)
    same_logits(load_bert(tmp_path / "theirs"), theirs)


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = export(build(), tmp_path / "out", max_length=16, end_of_document=None, tokenizer=None)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["cls.predictions.bias"]
    tensors["more"] = torch.zeros(1)
    tensors["bert.embeddings.LayerNorm.bias"] = torch.zeros(3)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        load_bert(folder)
    assert str(caught.value) == (
        f"{folder}: cls.predictions.bias is missing; more has no place; bert.embeddings.LayerNorm.bias is [3], not [24]\n"
        "  rule: it has config.json and model.safetensors of a BertForMaskedLM with gelu and learned positions\n"
        "  so:   no model was loaded\n"
        "  try:  BertForMaskedLM.from_pretrained(…).save_pretrained(folder)"
    )
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(CheckpointError, match="hidden_act = 'relu', no num_attention_heads"):
        load_bert(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        load_bert(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "config.json is not an object"),
        ({"hidden_size": "x"}, "hidden_size = 'x'"),
        ({"num_hidden_layers": 1 << 40}, f"num_hidden_layers = {1 << 40}"),
        ({"num_hidden_layers": 1 << 20}, f"num_hidden_layers = {1 << 20}"),
        ({"vocab_size": 1 << 30}, "bert.embeddings.word_embeddings.weight is "),
        ({"num_attention_heads": 5}, "num_heads 5 with dim 24"),
    ],
)
def test_sizes_that_are_not_those_of_the_weights(change: dict[str, object] | None, said: str, tmp_path: Path) -> None:
    """Nothing of such a size is allocated."""
    folder = export(build(), tmp_path / "out", max_length=16, end_of_document=None, tokenizer=None)
    config = folder / "config.json"
    config.write_text("[]" if change is None else json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(CheckpointError) as caught:
        load_bert(folder)
    assert said in str(caught.value)


def test_layers_that_the_weights_cannot_have_are_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of no size cost nothing, so their number alone bounds the layers too loosely: none but one is built."""
    folder = export(build(), tmp_path / "out", max_length=16, end_of_document=None, tokenizer=None)
    safetensors.torch.save_file({f"t{n}": torch.zeros(0) for n in range(1600)}, folder / "model.safetensors")
    built: list[int] = []
    monkeypatch.setattr("unisono.interop.bert.BERT", lambda options: built.append(options.num_layers) or BERT(options))
    config, content = folder / "config.json", json.loads((folder / "config.json").read_text())
    for layers, said in ((101, "num_hidden_layers = 101"), (100, "is missing; ")):
        config.write_text(json.dumps(content | {"num_hidden_layers": layers}))
        with pytest.raises(CheckpointError, match=said):
            load_bert(folder)
    assert built == [1]


# --- training --------------------------------------------------------------------------------------------------------


def test_it_learns_what_its_neighbours_tell(tmp_path: Path) -> None:
    """Each text repeats one token."""
    texts = [{"tokens": np.full(16, number % 20)} for number in range(80)]
    masking = MaskTokens(mask_id=20, vocab_size=21)
    with Trainer(
        build(vocab_size=21),
        from_map_style(texts),
        PlanOptions(device="cpu", global_batch=16, precision="fp32"),
        objective=masked_token,
        optimizer=OptimOptions(lr=1e-2),
        options=TrainOptions(steps=60, eval_every_steps=0),
        transform=masking,
        run_dir=tmp_path,
    ) as run:
        losses = [step.loss for step in run]
    assert losses[0] == pytest.approx(np.log(21), rel=0.1)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


def test_predicted_places_do_not_go_with_positions() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(DataError, match="predicted together with positions"):
        build()(tokens, predicted=torch.zeros(1, 1, dtype=torch.int64), positions=torch.arange(4)[None])
