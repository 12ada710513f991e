"""Folders of pretrained models: what is loaded of them, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from unisono.data.tokens.tokenizer import load_tokenizer
from unisono.errors import ConfigError
from unisono.tasks.options import LoraOptions, TaskOptions
from unisono.tasks.pretrained import load_pretrained
from unisono.tasks.pretrained_folder import refuse_other_tokenizer

transformers = pytest.importorskip(
    "transformers", reason="NOT CHECKED: the extra 'dev' (transformers) is not installed"
)

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = TaskOptions(kind="text", classes=("neg", "pos"))
HIDDEN = "masked_language_model"


def save(folder: Path, cls: str = "BertForMaskedLM", **values: Any) -> Path:
    torch.manual_seed(0)
    settings = {"vocab_size": 300, "max_position_embeddings": 32, **SIZES, **values}
    config = transformers.BertConfig(**settings) if cls.startswith("Bert") else transformers.LlamaConfig(**settings)
    getattr(transformers, cls)(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "hf")


def load(folder: Path, task: TaskOptions = TEXT, **lora: Any) -> Any:
    return load_pretrained(str(folder), task, LoraOptions(**lora), padding=None, cache=folder)


def refused(folder: Path, task: TaskOptions = TEXT, **lora: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(folder, task, **lora)
    assert str(folder) in str(raised.value) or lora
    return str(raised.value)


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def weights(folder: Path) -> dict[str, Any]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, Any]) -> None:
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_only_a_head_is_new(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "unisono"):
        model = load(folder)
    saved = weights(folder)
    for name, tensor in model.state_dict().items():
        assert name.startswith(("classifier.", "bert.pooler.")) or torch.equal(tensor, saved[name])
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "INFO",
            f"model.pretrained {str(folder)!r} has no weights for bert.pooler.dense.bias, bert.pooler.dense.weight, "
            "classifier.bias, classifier.weight: they are new",
        ),
        (
            "WARNING",
            f"model.pretrained {str(folder)!r} has 5 tensors that BertForSequenceClassification does not use, "
            "the first cls.predictions.bias",
        ),
    ]
    assert model.name_or_path == str(folder)


def test_a_head_of_other_classes_is_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "hf", "BertForSequenceClassification", num_labels=3)
    with caplog.at_level(logging.INFO, "unisono"):
        model = load(tmp_path / "hf")
    assert model.classifier.weight.shape == (2, 16)
    assert torch.equal(model.bert.pooler.dense.weight, weights(tmp_path / "hf")["bert.pooler.dense.weight"])
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "for classifier.bias, classifier.weight: they" in caplog.text


def test_the_head_of_a_language_model_is_new_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "hf", "LlamaModel", num_key_value_heads=2)
    load(tmp_path / "hf", TaskOptions())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has no weights for lm_head.weight: they are new" in caplog.text


@pytest.mark.parametrize("task", [TEXT, TaskOptions(kind=HIDDEN)], ids=lambda task: task.kind)
def test_weights_of_other_sizes(folder: Path, task: TaskOptions) -> None:
    change(folder, hidden_size=32)
    name = {"text": "BertForSequenceClassification", HIDDEN: "BertForMaskedLM"}[task.kind]
    said = refused(folder, task)
    first, rest = said.split("\n", 1)
    assert first.startswith(
        f"model.pretrained {str(folder)!r} as {name}: bert.embeddings.LayerNorm.bias is [16] in the files and [32] "
        f"by config.json, and {19 if task == TEXT else 23} more such weights"
    )
    assert rest == (
        "  rule: the weights are those of the model in config.json; only the head of the task may be new\n"
        "  so:   these weights would be random; nothing was started\n"
        "  try:  the config.json that was saved with the weights, or model.save_pretrained(folder) of a model of transformers, "
        "or a run's export"
    )


def test_weights_of_other_names(folder: Path) -> None:
    rewrite(folder, {f"other.{name}": tensor for name, tensor in weights(folder).items()})
    first = refused(folder).split("\n")[0]
    assert "bert.embeddings.LayerNorm.bias is not in the files, and 20 more such weights" in first
    assert "; not used are 26, the first other.bert.embeddings.LayerNorm.bias" in first


def test_one_weight_that_is_missing(folder: Path) -> None:
    rewrite(folder, {name: tensor for name, tensor in weights(folder).items() if "key.bias" not in name})
    first = refused(folder).split("\n")[0]
    assert first.endswith("Classification: bert.encoder.layer.0.attention.self.key.bias is not in the files; not used are 5, "
                          "the first cls.predictions.bias")  # fmt: skip


def test_layers_that_are_not_used_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "hf", num_hidden_layers=2)
    change(tmp_path / "hf", num_hidden_layers=1)
    load(tmp_path / "hf", TaskOptions(kind=HIDDEN))
    assert "has 16 tensors that BertForMaskedLM does not use, the first bert.encoder.layer.1." in caplog.text


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"_attn_implementation": "evil/kernel"}, "_attn_implementation 'evil/kernel'"),
        ({"attn_implementation": "flash|evil/kernel@main:run"}, "attn_implementation 'flash|evil/kernel@main:run'"),
        ({"_attn_implementation_internal": {"": "sdpa", "text_config": "evil/kernel"}}, "'evil/kernel'"),
        # without the package flash-attn it is fetched from a repository of kernels
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation 'flash_attention_2'"),
        ({"text_config": {"attn_implementation": "evil/kernel"}}, "attn_implementation 'evil/kernel'"),
        ({"layers": [{"_attn_implementation": "evil/kernel"}]}, "_attn_implementation 'evil/kernel'"),
        ({"experts_implementation": "sonicmoe"}, "experts_implementation 'sonicmoe'"),
        ({"text_config": {"auto_map": {"AutoModel": "evil.Model"}}}, "names code in the folder (auto_map)"),
        ({"custom_pipelines": {"x": {"impl": "evil.Pipe"}}}, "names code in the folder (custom_pipelines)"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "has quantization_config"),
        ({"transformers_weights": "../outside.safetensors"}, "has transformers_weights"),
        ({"distributed_config": {"tp_size": 2}}, "has distributed_config"),
        ({"fusion_config": {"x": True}}, "has fusion_config"),
        ({"use_pretrained_backbone": True}, "has use_pretrained_backbone"),
    ],
    ids=str,
)
def test_fields_that_name_code_or_other_files(folder: Path, changes: dict[str, Any], given: str) -> None:
    change(folder, **changes)
    assert given in refused(folder).split("\n")[0]


def test_fields_of_transformers_own(folder: Path) -> None:
    change(folder, _attn_implementation="eager", quantization_config=None, use_pretrained_backbone=False)
    assert load(folder).config._attn_implementation == "eager"


def test_transformers_sees_the_checked_files_alone_and_no_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    mark = tmp_path / "opened"
    # a pickle that makes a folder; the first two are a checkpoint of torch.distributed, which transformers prefers
    for name in (".metadata", "__0_0.distcp", "pytorch_model.bin"):
        (folder / name).write_text(f"cos\nmkdir\n(S{str(mark)!r}\ntR.")
    (folder / "modeling_bert.py").write_text(f"import os; os.mkdir({str(mark)!r})")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"import os; os.mkdir({str(mark)!r})")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    seen: list[tuple[list[str], bool, dict[str, Any]]] = []
    cls = transformers.AutoModelForSequenceClassification
    load_it = cls.from_pretrained

    def noted(path: str, **how: Any) -> Any:
        seen.append((sorted(os.listdir(path)), constants.HF_HUB_OFFLINE, how))
        return load_it(path, **how)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(cls, "from_pretrained", noted)
    load(folder)
    assert not constants.HF_HUB_OFFLINE
    [(files, offline, how)] = seen
    assert files == ["config.json", "generation_config.json", "model.safetensors"]
    assert offline
    assert (how["local_files_only"], how["trust_remote_code"], how["use_safetensors"]) == (True, False, True)
    assert not mark.exists()


def test_settings_of_generation_are_kept(tmp_path: Path) -> None:
    save(tmp_path / "hf", "LlamaForCausalLM")
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    assert load(tmp_path / "hf", TaskOptions()).generation_config.max_new_tokens == 7
    (tmp_path / "hf" / "generation_config.json").write_text("[]")
    assert "whose generation_config.json is []" in refused(tmp_path / "hf", TaskOptions())


@pytest.mark.parametrize("content", ["5", "null", "[]", '"bert"', "", "{", "[" * 100_000], ids=lambda text: text[:4])
def test_a_configuration_that_is_no_object(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    first, rule, *_ = refused(folder).split("\n")
    if content in ("5", "null", "[]", '"bert"'):
        assert first == f"model.pretrained {str(folder)!r}, whose config.json is {content}"
        assert rule == "  rule: config.json is a JSON object, as {...}"
    else:
        assert re.search("JSONDecodeError|LimitError: JSON with more than 100 lists", first)


def test_a_configuration_that_is_no_file(folder: Path) -> None:
    for make in (os.mkfifo, os.mkdir):
        (folder / "config.json").unlink()
        make(folder / "config.json")
        assert "OSError: config.json is not a file" in refused(folder)
    (folder / "config.json").rmdir()
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "ValueError: config.json has 1099511627776 bytes, at most 67108864 are read" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"num_attention_heads": 0}, "as AutoModelForSequenceClassification: ZeroDivisionError"),
        ({"hidden_size": "big"}, "as AutoModelForSequenceClassification: "),
        ({"id2label": ["a", "b"]}, "as AutoModelForSequenceClassification: "),
        ({"pad_token_id": 10**9}, "as AutoModelForSequenceClassification: "),
        ({"hidden_act": "evil"}, "as AutoModelForSequenceClassification: "),
        ({"vocab_size": -1}, "as AutoModelForSequenceClassification: "),
        ({"hidden_dropout_prob": float("nan")}, "ValueError: config.json has NaN"),
        ({"max_position_embeddings": 10**30}, "as AutoModelForSequenceClassification: "),
        ({"initializer_range": "x"}, "as AutoModelForSequenceClassification: "),
        ({"model_type": "detr", "backbone": "org/name"}, "as AutoModelForSequenceClassification: "),
        ({"model_type": 5}, "as AutoModelForSequenceClassification: "),
        ({"hidden_size": 10**6}, "whose config.json is of a model with 5000"),
        ({"vocab_size": 10**12}, "whose config.json is of a model with 16000000"),
        ({"num_hidden_layers": 10**9}, "whose config.json has num_hidden_layers 1000000000 for 26 tensors"),
    ],
    ids=str,
)
def test_a_configuration_of_no_model(folder: Path, changes: dict[str, Any], given: str) -> None:
    change(folder, **changes)
    assert given in refused(folder).split("\n")[0]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
        lambda path: path.write_bytes(struct.pack("<Q", 2) + b"[]"),
    ],
    ids=["cut", "empty", "huge header", "no header"],
)
def test_damaged_weights(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder / "model.safetensors")
    assert "whose model.safetensors cannot be read: " in refused(folder).split("\n")[0]


def test_a_backbone_of_a_hub_is_not_asked_for(folder: Path) -> None:
    change(folder, model_type="detr", backbone="org/name", use_timm_backbone=False)
    assert "OfflineModeIsEnabled" in refused(folder, TaskOptions(kind="image", classes=("a", "b")))


def sharded(folder: Path) -> dict[str, Any]:
    """Split the weights over two files; returns the index."""
    tensors = weights(folder)
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        members = {name: tensor for name, tensor in tensors.items() if names[name] == file}
        safetensors.torch.save_file(members, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    return {"weight_map": names}


def write_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_weights_in_several_files(folder: Path) -> None:
    expected = weights(folder)
    write_index(folder, sharded(folder))
    found = load(folder).state_dict()
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(found[name], expected[name])


def test_an_index_that_leaves_the_folder(folder: Path, tmp_path: Path) -> None:
    index = sharded(folder)
    first, file = next(iter(index["weight_map"].items()))
    shutil.copy(folder / file, tmp_path / "outside.safetensors")
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "..", "x.bin", 5, None):
        write_index(folder, {"weight_map": index["weight_map"] | {first: name}})
        assert f"whose model.safetensors.index.json has {name!r} for {first!r}" in refused(folder).split("\n")[0]
    write_index(folder, index)
    (folder / file).unlink()
    assert f"without {file}, which model.safetensors.index.json names" in refused(folder)
    (folder / file).symlink_to(tmp_path / "outside.safetensors")
    said = refused(folder)
    assert f"whose {file} is a link to {tmp_path / 'outside.safetensors'}" in said
    assert "  rule: a folder has its files in it" in said


@pytest.mark.parametrize("weight_map", [3, None, {}, []], ids=str)
def test_an_index_without_names(folder: Path, weight_map: Any) -> None:
    sharded(folder)
    write_index(folder, {"weight_map": weight_map})
    assert f"has weight_map {json.dumps(weight_map)}" in refused(folder).split("\n")[0]


def test_weights_of_another_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert "with consolidated.safetensors, and without model.safetensors or" in refused(folder)


def test_links_of_a_folder(folder: Path, tmp_path: Path) -> None:
    """A link elsewhere is refused; a snapshot in the hub's cache has links to its blobs."""
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        assert f"whose {name} is a link to {tmp_path / name}" in refused(folder)
        (folder / name).unlink()
        shutil.copy(tmp_path / name, folder / name)
    model = tmp_path / "models--org--name"
    snapshot, blobs = model / "snapshots" / "0123", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert load(snapshot).config.hidden_size == 16


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_the_rank_of_adapters_is_below_that_of_the_layers(tmp_path: Path) -> None:
    save(tmp_path / "hf", "LlamaForCausalLM", num_key_value_heads=1)
    for modules, limit in (((), 16), (("q_proj", "v_proj"), 16), (("v_proj",), 8)):
        said = refused(tmp_path / "hf", TaskOptions(), rank=99_999_999, modules=modules)
        assert said == (
            f"lora.rank 99999999 for LlamaForCausalLM, whose adapted layers have ranks of at most {limit}\n"
            "  rule: an adapter is a product of two matrices with a lower rank than the layer's\n"
            "  so:   the adapters would be larger than the layers; nothing was started\n"
            "  try:  lora.rank=8"
        )
    adapted = load(tmp_path / "hf", TaskOptions(), rank=8, modules=("v_proj",))
    assert {tuple(p.shape) for p in adapted.parameters() if p.requires_grad} == {(8, 16), (8, 8)}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_a_folder_of_adapters(folder: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "export"
    load(folder, rank=2).save_pretrained(adapters)
    assert not (adapters / "config.json").exists()
    assert refused(adapters) == (
        f"model.pretrained {str(adapters)!r}, which has adapters of {str(folder)!r} (adapter_config.json) "
        "without the model itself\n"
        "  rule: the folder has a whole model; adapters alone, as a run with lora.rank exports them, are not loaded\n"
        "  so:   nothing was started\n"
        "  try:  to train them further, the run.dir that they are of with more train.steps; to start from them, a folder "
        f"written by PeftModel.from_pretrained(base, {str(adapters)!r}).merge_and_unload().save_pretrained(...); for new ones, "
        f"model.pretrained={folder} with lora.rank=8"
    )
    # transformers would fetch that base from a hub, or load adapters that the user did not ask for
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "evil/model"}))
    assert "which has adapters of 'evil/model' (adapter_config.json) beside a model" in refused(folder)
    (folder / "adapter_config.json").write_text("[]")
    assert "whose adapter_config.json is []" in refused(folder)


@pytest.mark.parametrize(
    "name", ["vocab.txt", "tokenizer.model", "spiece.model", "merges.txt", "tokenizer_config.json"]
)
def test_another_tokenizer(folder: Path, name: str) -> None:
    refuse_other_tokenizer(str(folder))  # none at all
    (folder / name).touch()
    with pytest.raises(ConfigError) as raised:
        refuse_other_tokenizer(str(folder))
    assert str(raised.value) == (
        f"model.pretrained {str(folder)!r} with {name} and without tokenizer.json\n"
        "  rule: texts are encoded by tokenizer.json, and as raw bytes where the folder has no tokenizer\n"
        "  so:   the model would see other token ids than it learned; nothing was started\n"
        f"  try:  transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}), which writes "
        "tokenizer.json, or data.tokenizer=FILE"
    )
    (folder / "tokenizer.json").touch()
    refuse_other_tokenizer(str(folder))


def test_the_remedy_writes_a_tokenizer(folder: Path) -> None:
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n")
    transformers.AutoTokenizer.from_pretrained(str(folder)).save_pretrained(str(folder))
    refuse_other_tokenizer(str(folder))
    assert load_tokenizer(str(folder)).encode_marked(["a b"], 8)[0] == [2, 5, 6, 3]
