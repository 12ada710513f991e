"""The compressed sum over real processes: what each worker's codes mean, added in rank order, the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from unisono.errors import CheckpointError, ConfigError
from unisono.kvstore.allreduce.buckets import BucketedAllReduce
from unisono.kvstore.compression import ErrorFeedback, find_codec

GATHERED = ["2bit:0.5", "2bit:rms*1.5", "1bit", "1bit-mxnet:0.5", "topk:0.05", "int8"]
EVERY = [*GATHERED, "fp16", "bf16", "powersgd:2"]
SHAPES = {"bias": (7,), "weight": (40, 30), "kernel": (8, 4, 3, 3), "scalar": ()}


def gradient(name: str, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    seed = 1000 * step + 10 * rank + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def one_step(sync: BucketedAllReduce, trained: dict[str, nn.Parameter], rank: int, step: int) -> list[list[float]]:
    """A backward pass whose gradients are ``gradient``; the sums, flat, in parameter order."""
    sync.zero_grad()
    sync.prepare_last_backward()
    sum((p * gradient(name, rank, step, p.dtype)).sum() for name, p in trained.items()).backward()
    sync.wait(torch.zeros(1))
    return [each.flatten().tolist() for each in sync.gradients()]


def sums(
    world, codecs: Sequence[str], bucket_bytes: int, dtype: torch.dtype, skipped: int = 1, restart: int = 2
) -> dict[str, list[list[list[float]]]]:
    """Four steps with each codec: step ``skipped`` is not good, step ``restart`` is made by an object that loaded the state."""
    made = {}
    for codec in codecs:
        trained = parameters(dtype)
        sync = BucketedAllReduce(trained, world, bucket_bytes, codec=find_codec(codec))
        made[codec] = []
        for step in range(4):
            if step == restart:
                state = {key: value.clone() for key, value in sync.state_dict().items()}
                sync.close()
                sync = BucketedAllReduce(trained, world, bucket_bytes, codec=find_codec(codec))
                sync.load_state_dict(state)
            made[codec].append(one_step(sync, trained, world.rank, step))
            sync.commit(torch.tensor(step != skipped))
        sync.close()
    return made


def expected(codec_name: str, ranks: int, dtype: torch.dtype, skipped: int = 1) -> list[list[list[float]]]:
    codec = find_codec(codec_name)
    feedback = [ErrorFeedback(parameters(dtype), worker=rank) for rank in range(ranks)]
    steps = []
    for step in range(4):
        made = []
        for name in SHAPES:
            each = [gradient(name, rank, step, dtype) for rank in range(ranks)]
            codes = [feedback[rank].encode(codec, name, each[rank]) for rank in range(ranks)]
            numel = each[0].numel()
            total = sum(codec.decode(code, numel, torch.float32) for code in codes)
            made.append(total.to(dtype).tolist())
        for each in feedback:
            each.commit(step != skipped)
        steps.append(made)
    return steps


@pytest.mark.parametrize(("ranks", "bucket_bytes", "dtype"), [(2, 1 << 20, torch.bfloat16), (3, 1, torch.float32)])
def test_the_sum_is_that_of_the_decoded_codes(pool: Pool, ranks: int, bucket_bytes: int, dtype: torch.dtype) -> None:
    outcomes = pool.run(sums, GATHERED, bucket_bytes, dtype, ranks=ranks)
    for codec in GATHERED:
        truth = expected(codec, ranks, dtype)
        for outcome in outcomes:
            assert outcome[codec] == truth, codec


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_casts_and_powersgd_are_the_same_on_all_ranks_and_in_all_runs(pool: Pool, ranks: int) -> None:
    names = ["fp16", "bf16", "powersgd:2"]
    outcomes = pool.run(sums, names, 2000, torch.float32, ranks=ranks)
    # again, resumed at another step
    again = pool.run(sums, names, 2000, torch.float32, restart=3, ranks=ranks)
    for codec in names:
        for outcome in outcomes + again:
            assert outcome[codec] == outcomes[0][codec], codec
    for codec, near in (("fp16", 0.01), ("bf16", 0.06)):
        for step, made in enumerate(outcomes[0][codec]):
            for name, got in zip(SHAPES, made, strict=True):
                plain = sum(gradient(name, rank, step) for rank in range(ranks)).flatten()
                assert float((torch.tensor(got) - plain).abs().max()) < near * ranks


def test_other_buckets_and_skips_change_what_they_should(pool: Pool) -> None:
    names = ["int8", "powersgd:2"]
    small, large, none_skipped = (
        pool.run(sums, names, bucket_bytes, torch.float32, skipped, ranks=2)[0]
        for bucket_bytes, skipped in [(1, 1), (1 << 20, 1), (1, -1)]
    )
    assert small["int8"] == large["int8"]
    for codec in names:
        assert small[codec][:2] == none_skipped[codec][:2]
        assert small[codec][2:] != none_skipped[codec][2:]


def fp16_sum(world, value: float) -> float:
    trained = {"w": nn.Parameter(torch.zeros(4))}
    sync = BucketedAllReduce(trained, world, codec=find_codec("fp16"))
    sync.prepare_last_backward()
    (trained["w"] * value).sum().backward()
    sync.wait(torch.zeros(1))
    return float(sync.gradients()[0][0])


def test_fp16_sums_past_its_own_range(pool: Pool) -> None:
    assert pool.run(fp16_sum, 49152.0, ranks=2) == [98304.0, 98304.0]
    assert pool.run(fp16_sum, 200_000.0, ranks=2) == [float("inf")] * 2  # seen, not clipped


# --- steps that are not good -------------------------------------------------------------------------------------------


def poisoned(world, bad: float) -> dict[str, tuple[bool, bool]]:
    return {codec: poisoned_with(world, codec, bad) for codec in EVERY}


def poisoned_with(world, codec: str, bad: float) -> tuple[bool, bool]:
    """(this rank saw what was not finite on rank 1, its state stayed as it was)."""
    trained = parameters()
    sync = BucketedAllReduce(trained, world, codec=find_codec(codec))
    one_step(sync, trained, world.rank, 0)
    sync.commit(True)
    before = {name: value.clone() for name, value in sync.state_dict().items() if name != "steps"}
    sync.zero_grad()
    sync.prepare_last_backward()
    factor = bad if world.rank == 1 else 1.0
    sum((p * gradient(name, world.rank, 1) * factor).sum() for name, p in trained.items()).backward()
    sync.wait(torch.zeros(1))
    finite = torch.stack([g.isfinite().all() for g in sync.gradients()]).all()
    sync.commit(finite)
    after = sync.state_dict()
    return not bool(finite), all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_ranks_bad_gradients_reach_all_and_leave_no_trace(pool: Pool, bad: float) -> None:
    for outcome in pool.run(poisoned, bad, ranks=2):
        assert outcome == dict.fromkeys(EVERY, (True, True))


def refusals(world) -> list[str]:
    texts = []
    trained = parameters()
    try:
        BucketedAllReduce(trained, world, codec=find_codec("int8"), reduce_dtypes={"weight": torch.bfloat16})
    except ConfigError as error:
        texts.append(str(error))
    plain = BucketedAllReduce(trained, world)
    sync = BucketedAllReduce(trained, world, codec=find_codec("powersgd:2"))
    others = BucketedAllReduce(trained, world, codec=find_codec("int8"))
    for target, state in ((plain, sync.state_dict()), (sync, others.state_dict()), (others, sync.state_dict())):
        try:
            target.load_state_dict(state)
        except CheckpointError as error:
            texts.append(str(error))
    assert plain.state_dict() == plain.stats() == {}
    plain.load_state_dict({})
    plain.commit(True)
    one_step(sync, trained, world.rank, 0)
    sync.commit(True)
    assert sync.stats().keys() == {"weight", "kernel"}
    assert sync.stats()["weight"]["bytes_in"] == 4 * 40 * 30
    assert sync.stats()["weight"]["bytes_out"] == 4 * 2 * (40 + 30)
    for each in (plain, sync, others):
        each.close()
    return texts


def test_refusals_say_why(pool: Pool) -> None:
    for texts in pool.run(refusals, ranks=2):
        assert "compression 'int8', and gradients such as that of 'weight' sent as torch.bfloat16" in texts[0]
        assert "residuals of compression, such as 'factor/kernel'; this run has no compression" in texts[1]
        assert "compression state 'kernel' is missing in the checkpoint" in texts[2]
        assert "compression state 'bias' is missing in the checkpoint" in texts[3]


# --- PowerSGD against a plain implementation ---------------------------------------------------------------------------


def low_rank(world, steps: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    trained = {"w": nn.Parameter(torch.zeros(40, 30, dtype=torch.float64))}
    sync = BucketedAllReduce(trained, world, codec=find_codec("powersgd:2"))
    first = sync.state_dict()["factor/w"].clone().numpy()
    made = []
    for step in range(steps):
        sync.zero_grad()
        sync.prepare_last_backward()
        (trained["w"] * gradient("weight", world.rank, step, torch.float64)).sum().backward()
        sync.wait(torch.zeros(1))
        made.append(sync.gradients()[0].clone().numpy())
        sync.commit(True)
    return made, {"first": first, "residual": sync.state_dict()["residual/w"].numpy()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_powersgd_is_the_papers(pool: Pool, ranks: int) -> None:
    outcomes = pool.run(low_rank, 5, ranks=ranks)
    right = outcomes[0][1]["first"]
    held = [np.zeros((40, 30)) for _ in range(ranks)]
    for step in range(5):
        matrices = [held[rank] + gradient("weight", rank, step, torch.float64).numpy() for rank in range(ranks)]
        left = np.linalg.qr(sum(matrix @ right for matrix in matrices))[0]
        rights = [matrix.T @ left for matrix in matrices]
        right = sum(rights)
        held = [matrix - left @ own.T for matrix, own in zip(matrices, rights, strict=True)]
        for made, _ in outcomes:
            np.testing.assert_allclose(made[step], left @ right.T, rtol=0, atol=1e-10)
    for rank, (_, state) in enumerate(outcomes):
        np.testing.assert_allclose(state["residual"].reshape(40, 30), held[rank], rtol=0, atol=1e-10)


def zeros_then_rank_one(world) -> tuple[float, float]:
    trained = {"w": nn.Parameter(torch.zeros(40, 30))}
    sync = BucketedAllReduce(trained, world, codec=find_codec("powersgd:2"))
    truth = torch.outer(torch.arange(40.0), torch.ones(30))
    for scale in (0.0, 1.0, 1.0):
        sync.zero_grad()
        sync.prepare_last_backward()
        (trained["w"] * truth * scale).sum().backward()
        sync.wait(torch.zeros(1))
        largest = float(sync.gradients()[0].abs().max()) if scale == 0 else 0.0
        sync.commit(True)
    return largest, float(sync.state_dict()["residual/w"].abs().max())


def test_powersgd_survives_gradients_of_zeros(pool: Pool) -> None:
    for largest, held in pool.run(zeros_then_rank_one, ranks=2):
        assert largest == 0.0
        assert held < 1e-3  # of 40: the iteration found its way from nothing


# --- training ----------------------------------------------------------------------------------------------------------

STEPS = 150


class Regression:
    """A matrix that learns another from noisy samples, each worker from half of them: SGD with momentum and a falling rate."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(256, 32, generator=source)
        self.outputs = self.inputs @ torch.randn(32, 16, generator=source)
        self.outputs += 0.3 * torch.randn(256, 16, generator=source)
        self.weight, self.momentum = torch.zeros(32, 16), torch.zeros(32, 16)

    def gradient(self, rank: int) -> Tensor:
        inputs, outputs = self.inputs[rank::2], self.outputs[rank::2]
        return inputs.T @ (inputs @ self.weight - outputs) / 128

    def update(self, total: Tensor, step: int) -> None:
        self.momentum = 0.5 * self.momentum + total
        self.weight -= 0.1 * (1 - step / STEPS) * self.momentum

    def loss(self) -> float:
        return float((self.inputs @ self.weight - self.outputs).square().mean())


def loss_without_compression() -> float:
    task = Regression()
    for step in range(STEPS):
        task.update(task.gradient(0) + task.gradient(1), step)
    assert task.loss() < 0.09
    return task.loss()


@pytest.mark.parametrize("name", ["2bit:0.5", "2bit:rms*1.5", "1bit", "topk:0.1", "int8", "fp16", "bf16"])
def test_training_reaches_the_loss_without_compression(name: str) -> None:
    codec, task = find_codec(name), Regression()
    workers = [ErrorFeedback({"w": task.weight}, rank) for rank in range(2)]
    for step in range(STEPS):
        codes = [worker.encode(codec, "w", task.gradient(rank)) for rank, worker in enumerate(workers)]
        task.update(sum(codec.decode(code, 512, torch.float32) for code in codes).view(32, 16), step)
        for worker in workers:
            worker.commit(True)
    assert task.loss() < 1.1 * loss_without_compression()


def low_rank_training(world) -> float:
    task = Regression()
    trained = {"w": nn.Parameter(task.weight.clone())}
    sync = BucketedAllReduce(trained, world, codec=find_codec("powersgd:2"))
    for step in range(STEPS):
        sync.zero_grad()
        sync.prepare_last_backward()
        (trained["w"] * task.gradient(world.rank)).sum().backward()
        sync.wait(torch.zeros(1))
        task.update(sync.gradients()[0], step)
        sync.commit(True)
    return task.loss()


@pytest.mark.full
def test_training_with_powersgd_reaches_it_too(pool: Pool) -> None:
    for loss in pool.run(low_rank_training, ranks=2):
        assert loss < 1.1 * loss_without_compression()
