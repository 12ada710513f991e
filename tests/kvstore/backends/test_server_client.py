"""Workers and real server processes: values, updates, work, clocks; and what is left when one of them is killed."""

from __future__ import annotations

from pathlib import Path

import torch
from parameter_servers import numbers, parameter_servers, recipe

SHAPES = ((2000, 1000), (3,), (700, 1024), (), (5, 7))


def test_values_updates_and_state(tmp_path: Path) -> None:
    table = numbers(*SHAPES)
    with parameter_servers(tmp_path, 2) as servers:
        worker = servers.connect(table)
        assert not worker.is_initialised
        worker.init(table)
        worker.set_optimizer(recipe(table, kind="adamw", lr=0.1))
        found = {key: torch.empty_like(value) for key, value in table.items()}
        worker.pull(found).wait()
        assert all(torch.equal(found[key], table[key]) for key in table)
        gradients = numbers(*SHAPES, seed=1)
        worker.push(gradients, found, lr=0.01).wait()
        parameters = [torch.nn.Parameter(value.clone()) for value in table.values()]
        plain = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
        for parameter, gradient in zip(parameters, gradients.values(), strict=True):
            parameter.grad = gradient
        plain.step()
        assert all(torch.equal(found[key], each) for key, each in zip(table, parameters, strict=True))
        second = servers.connect(table, worker=1, shared_memory=False)
        assert second.is_initialised
        state = second.state()
        assert all(torch.equal(state[key], found[key]) for key in table)
        moments = [plain.state[parameter]["exp_avg"] for parameter in parameters]
        assert all(torch.equal(state[f"optim/exp_avg/{key}"], m) for key, m in zip(table, moments, strict=True))
        for each, way in ((worker, ""), (second, "none was asked for")):
            assert {traffic.no_shared_memory_reason for traffic in each.traffic()} == {way}
            assert all((traffic.shared_sent_bytes == 0) == bool(way) for traffic in each.traffic())
        assert all(traffic.received_bytes < 20_000 for traffic in worker.traffic())
        over_tcp = {key: torch.empty_like(value) for key, value in table.items()}
        second.pull(over_tcp).wait()
        assert all(torch.equal(over_tcp[key], found[key]) for key in table)
        second.push(gradients, over_tcp, lr=0.02).wait()
        plain.param_groups[0]["lr"] = 0.02
        plain.step()
        assert all(torch.equal(over_tcp[key], each) for key, each in zip(table, parameters, strict=True))
        second.load_state(state | {key: value + 1 for key, value in over_tcp.items()})
        worker.pull(found).wait()
        assert torch.equal(found["w1"], parameters[1] + 1)
        second.close()
        assert worker.stats()[0]["workers"] == {"0": 0}  # at once, not when a lease ends
        worker.close()
