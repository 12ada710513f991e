"""What a trace records: operations, the modules they are in, the parameters and values they read."""

from __future__ import annotations

import tiny
import torch
from torch import nn

from unisono.parallel.deferred_init import deferred_init
from unisono.plan.trace import trace


def test_a_gpt_is_seen_as_it_computes() -> None:
    model = tiny.model(num_layers=2, tied=True)
    generator, before = torch.get_rng_state(), {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = trace(model, {"tokens": torch.zeros(2, 12, dtype=torch.long)})
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    by_parameter = {name: op for op in seen.ops for name in op.parameters}
    assert by_parameter["embedding.weight"].name == "embedding"
    assert seen.returned == ("embedding.weight",)
    assert by_parameter.keys() == dict(model.named_parameters()).keys()
    query, key, out = (by_parameter[f"blocks.1.attention.{name}.weight"] for name in ("q", "k", "out"))
    assert (query.name, query.module, query.shapes) == ("linear", "blocks.1.attention.q", ((2, 12, 16),))
    assert query.inputs == key.inputs
    names = [op.name for op in seen.ops if op.module.startswith("blocks.0")]
    assert names.count("scaled_dot_product_attention") == names.count("silu") == 1

    reach = set(query.outputs)  # the value goes from the query to the output projection
    for op in seen.ops:
        if not reach.isdisjoint(op.inputs):
            reach.update(op.outputs)
    assert reach.issuperset(out.inputs)
    assert reach.issuperset(seen.outputs)

    first, second = (next(call for call in seen.calls if call.module == f"blocks.{i}") for i in range(2))
    assert second.arguments[0] == ("0", first.outputs[0])
    assert not first.returns_tuple
    weighed = seen.parameter_dependent()
    assert weighed.issuperset(first.outputs[0])
    assert weighed.isdisjoint(first.arguments[1][1])  # the angles


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.inner(x).T.T, self.scale


def test_an_operation_is_of_the_innermost_module_and_returned_parameters_are_named() -> None:
    seen = trace(Returning(), {"x": torch.zeros(3, 3)})
    assert [(op.name, op.module) for op in seen.ops] == [("linear", "inner"), ("T", ""), ("T", ""), ("add", "")]
    assert seen.ops[0].parameters == ("inner.weight", "inner.bias")
    assert seen.returned == ("scale",)
    assert seen.ops[3].outputs == seen.outputs


def test_a_model_without_values_computes_the_same() -> None:
    def build() -> torch.nn.Module:
        return tiny.model(num_experts=4, num_experts_per_token=2, ffn_dim=16)

    inputs = {"tokens": torch.zeros(2, 12, dtype=torch.int64)}
    assert trace(build(), inputs) == trace(deferred_init(build).model, inputs)
