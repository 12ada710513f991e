from __future__ import annotations

import tomllib
from typing import Any

import jsonschema
import pytest
from config_example import Run

from unisono.config import load_config, schema, starter


@pytest.fixture(scope="module")
def validator() -> Any:
    made = schema(Run)
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


def test_shape():
    made = schema(Run)
    assert (made["$schema"], made["title"]) == ("https://json-schema.org/draft/2020-12/schema", "Run")
    assert made["description"] == "Everything about one run."
    assert made["additionalProperties"] is False
    assert list(made["properties"])[:3] == ["base", "seed", "name"]
    optim = made["properties"]["optim"]
    assert (optim["description"], optim["additionalProperties"]) == ("How parameters move.", False)
    assert optim["properties"]["lr"] == {
        "description": "Peak learning rate.",
        "default": 0.001,
        "type": "number",
        "exclusiveMinimum": 0,
        "exclusiveMaximum": 10,
    }
    assert optim["properties"]["clip"] == {
        "description": "Largest global norm of the gradient.",
        "default": 1.0,
        "anyOf": [{"type": "number", "minimum": 0}, {"const": "none"}],
    }
    assert optim["properties"]["schedule"]["properties"]["kind"]["enum"] == ["cosine", "linear"]
    assert "description" not in optim["properties"]["schedule"], "the decorator's docstring is no help"
    assert made["properties"]["model"]["properties"]["build"]["type"] == "string"


GOOD = [
    "",
    "base = 'x.toml'\nseed = 3\nnote = 'none'\ntags = ['a']\n",
    "layers = [3]\nweights = {a = 1, b = 0.5}\n",
    "[optim]\nlr = 1\nbetas = [0, 0.5]\nname = 'sgd'\nclip = 'none'\n[optim.schedule]\nkind = 'linear'\n",
    "[model]\nmicro_batch = 3\nbuild = 'resnet'\nloss = 'none'\ntied = false\n",
    "model.micro_batch = 'auto'",
]
BAD = [
    "sed = 3",
    "base = 3",
    "seed = -1",
    "seed = '3'",
    "name = 3",
    "tags = 'a'",
    "layers = [4]",
    "weights = {a = -1}",
    "optim = 3",
    "optim.lr = 0",
    "optim.lr = 10",
    "optim.lr = 'none'",
    "optim.betas = [0.5]",
    "optim.betas = [0.5, 1]",
    "optim.name = 'adam'",
    "optim.clip = -1",
    "optim.schedule.kind = 'cos'",
    "model.micro_batch = 'all'",
    "model.micro_batch = 0",
    "model.tied = 1",
    "model.heads.x = 1",
]


@pytest.mark.parametrize("text", GOOD)
def test_what_loads_is_valid(validator: Any, tmp_path: Any, text: str):
    validator.validate(tomllib.loads(text))
    path = tmp_path / "run.toml"
    path.write_text(f"# run\n{text}".replace("base = 'x.toml'", ""))
    load_config(Run, [path])


@pytest.mark.parametrize("text", BAD)
def test_what_does_not_load_is_invalid(validator: Any, text: str):
    assert not validator.is_valid(tomllib.loads(text))


def test_files_we_write_are_valid(validator: Any):
    validator.validate(tomllib.loads(load_config(Run).to_toml()))
    validator.validate(tomllib.loads(starter(Run)))
