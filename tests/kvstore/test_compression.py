"""``set_compression`` of stores with collectives: sums of codes, what is held back, where nothing travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from unisono.dist import JobSpec, World
from unisono.errors import CheckpointError, CommError, ConfigError
from unisono.kvstore import KVStore, LocalSGD, LocalSGDConfig, create_kvstore
from unisono.kvstore.compression import find_codec

SHAPES = {"w": (64, 48), "b": (7,), "d": (5, 3)}


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    torch.manual_seed(100 * rank + step)
    return {key: torch.randn(shape, dtype=dtype_of(key)) for key, shape in SHAPES.items()}


def dtype_of(key: str) -> torch.dtype:
    return torch.float64 if key == "d" else torch.float32


def filled(store: KVStore, codec: str) -> KVStore:
    store.set_compression(codec)
    store.init({key: torch.zeros(shape, dtype=dtype_of(key)) for key, shape in SHAPES.items()})
    return store


def pushed(store: KVStore, steps: range) -> None:
    for step in steps:
        store.push(gradients(store.rank, step)).wait()


CODECS = ("int8", "2bit:rms*1.5", "bf16", "powersgd:2")
STEPS = 6
# bfloat16 sums are rounded once more by the all-reduce that makes them, which no worker can hold back
ATOL = {"int8": 1e-4, "2bit:rms*1.5": 1e-4, "bf16": 0.1, "powersgd:2": 1e-4}


def coded_updates(world) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for codec in CODECS:
        store = filled(create_kvstore("dist_sync", world), codec)
        store.set_optimizer("sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
        pushed(store, range(STEPS))
        values = {key: store.pull(key).wait().numpy() for key in SHAPES}
        state = {name: each.numpy() for name, each in store.state_dict().items()}
        found.append({"values": values, "state": state, "stats": store.stats()["w"]})
    return found


@pytest.mark.full
def test_what_was_not_sent_yet_is_what_is_held_back(pool: Pool) -> None:
    for codec, one, other in zip(CODECS, *pool.run(coded_updates), strict=True):
        for key, shape in SHAPES.items():
            assert np.array_equal(one["values"][key], other["values"][key])  # bit for bit
            whole = sum(gradients(rank, step)[key].numpy() for rank in (0, 1) for step in range(STEPS))
            held = [each["state"].get(f"compression/residual/{key}", np.zeros(shape)) for each in (one, other)]
            left = (held[0] + held[1]).reshape(shape)
            np.testing.assert_allclose(-one["values"][key] + left, whole, atol=ATOL[codec], err_msg=f"{codec} {key}")
        sent = one["stats"]
        assert sent["bytes_in"] == 64 * 48 * 4
        assert sent["bytes_out"] < sent["bytes_in"] * 0.6
        assert sent["residual"] > 0


def goes_on(world, codec: str) -> None:
    first = filled(create_kvstore("dist_sync", world), codec)
    first.set_optimizer("sgd", lr=0.1)
    pushed(first, range(3))
    saved = {name: each.clone() for name, each in first.state_dict().items()}
    pushed(first, range(3, 6))
    second = filled(create_kvstore("dist_sync", world), codec)
    second.set_optimizer("sgd", lr=0.1)
    second.load_state_dict(saved)
    pushed(second, range(3, 6))
    assert all(torch.equal(each, second.state_dict()[name]) for name, each in first.state_dict().items())
    with pytest.raises(CheckpointError, match="is missing in the checkpoint"):
        second.load_state_dict({name: each for name, each in saved.items() if not name.startswith("compression/")})
    plain = filled(create_kvstore("dist_sync", world), "none")
    plain.set_optimizer("sgd", lr=0.1)
    with pytest.raises(CheckpointError, match="differ in 'compression/"):
        plain.load_state_dict(saved)


def test_a_coded_store_goes_on_exactly(pool: Pool) -> None:
    pool.run(goes_on, "int8")
    pool.run(goes_on, "powersgd:2")


def what_is_not_coded(world) -> None:
    store = create_kvstore("dist_sync", world)
    store.set_compression("1bit")
    store.init({"w": torch.zeros(9), "rows": torch.zeros(4, 2), "n": torch.zeros(3, dtype=torch.int64)})
    store.push("n", torch.tensor([1, 2, 3])).wait()
    store.push("rows", (torch.tensor([2]), torch.tensor([[0.1, 7.0]]))).wait()
    assert store.pull("n").wait().tolist() == [2, 4, 6]
    assert store.pull("rows").wait()[2].tolist() == pytest.approx([0.2, 14.0])
    assert store.stats() == {}
    bad = torch.ones(9)
    bad[3] = float("inf") if world.rank else 1.0
    store.push("w", bad).wait()
    assert not bool(store.pull("w").wait().isfinite().all())
    assert not store.state_dict()["compression/residual/w"].any()  # an infinity is not carried on
    for call, text in (
        (lambda: store.set_compression("int8"), "compression 'int8' after the first push"),
        (lambda: store.set_compression("none"), "compression 'none' after the first push"),
        (lambda: store.init("late", torch.zeros(1)), "init of 'late' after the first push with compression"),
    ):
        with pytest.raises(ConfigError, match=text):
            call()


def test_what_is_not_coded(pool: Pool) -> None:
    pool.run(what_is_not_coded)


def refusals(world) -> None:
    store = create_kvstore("dist_sync", world)
    with pytest.raises(CommError, match="the store's compression is"):
        store.set_compression("int8" if world.rank else "bf16")
    with pytest.raises(ConfigError, match=r"did you mean 'int8'\?"):
        store.set_compression("int9")
    store.set_compression("2bit")
    store.set_compression("none")
    for more in ({"shared_memory": True}, {"hierarchical": True}):
        other = create_kvstore("dist_sync", world, **more)
        with pytest.raises(
            ConfigError, match="compression 'int8' together with sums through shared memory or host by host"
        ):
            other.set_compression("int8")
        other.close()
    with pytest.raises(ConfigError, match="parameters are sent flat and have no factors"):
        create_kvstore("dist_local", world, local_sgd=LocalSGDConfig(local_steps=2)).set_compression("powersgd:2")


def test_refusals(pool: Pool) -> None:
    pool.run(refusals)
    alone = World(JobSpec())
    for kind in ("local", "device"):
        with pytest.raises(ConfigError, match="'int8' on a store of one process") as caught:
            create_kvstore(kind, alone).set_compression("int8")
        assert "the workers of 'dist_sync', 'dist_async' and 'dist_local'" in str(caught.value)
    for store in (
        create_kvstore("dist_sync", alone),
        create_kvstore("dist_local", alone, local_sgd=LocalSGDConfig(local_steps=2)),
    ):
        with pytest.raises(ConfigError, match="compression 'int8' with one worker"):
            store.set_compression("int8")


def seam(world) -> list[list[float]]:
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    store = create_kvstore("dist_sync", world)
    store.set_compression("2bit:0.5")
    sync = store.gradients(dict(model.named_parameters()))
    sync.prepare_last_backward()
    (model(torch.tensor([[0.5, 0.2, -0.7]])) * (1 + world.rank)).sum().backward()
    sync.wait(torch.zeros(1))
    found = [each.tolist() for each in sync.gradients()]
    sync.close()
    return found[0]


def test_the_trainers_seam_is_coded_too(pool: Pool) -> None:
    assert pool.run(seam) == [[[1.0, 0.0, -1.0]] * 2] * 2


# --- local steps ---------------------------------------------------------------------------------------------------

ROUNDS = LocalSGDConfig(local_steps=4, num_fragments=2, outer_delay_steps=1)


def drift(parameters: dict[str, Tensor], rank: int, step: int) -> None:
    for number, value in enumerate(parameters.values()):
        value.sub_(0.1 * (value * (1 + rank) - number - 0.1 * step))


def local_steps(world) -> None:
    def run(codec: str | None, stop: int) -> dict[str, Tensor]:
        """Parameters after 24 steps, with a new process from step ``stop`` on."""
        parameters = {key: torch.linspace(-1, 1, 600).view(20, 30).clone() for key in "ab"}
        made = None if codec is None else find_codec(codec)
        local = LocalSGD(parameters, world, ROUNDS, made)
        for step in range(24):
            if step == stop:
                state = local.state_dict()
                local = LocalSGD(parameters, world, ROUNDS, made)
                local.load_state_dict(state)
            drift(parameters, world.rank, step)
            local.after_step(step)
        return parameters

    plain, whole = run(None, 99), run("int8", 99)
    for resumed in (run("int8", 9), run("int8", 12)):
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    for key in plain:
        assert not torch.equal(plain[key], whole[key])
        torch.testing.assert_close(plain[key], whole[key], rtol=0.02, atol=0.02)


def test_coded_rounds_come_close_and_go_on_exactly(pool: Pool) -> None:
    pool.run(local_steps)


def store_of_rounds(world) -> dict[str, dict[str, float]]:
    store = create_kvstore("dist_local", world, local_sgd=LocalSGDConfig(local_steps=2, num_fragments=2))
    store.set_compression("2bit:rms*1.5")
    store.set_optimizer("sgd", lr=0.1)
    store.init({"a": torch.zeros(640), "b": torch.zeros(320)})
    assert store.stats() == {}
    for step in range(5):
        store.push({"a": torch.randn(640), "b": torch.full((320,), step + world.rank + 0.5)}).wait()
    assert any(name.startswith("rounds/compression/1/residual") for name in store.state_dict())
    with pytest.raises(ConfigError, match="after the first push"):
        store.set_compression("int8")
    return store.stats()


def test_a_store_of_coded_rounds(pool: Pool) -> None:
    stats, _ = pool.run(store_of_rounds)
    assert {name: (each["bytes_in"], each["bytes_out"]) for name, each in stats.items()} == {
        "0/0": (2560, 168),
        "1/0": (1280, 88),
    }
