"""Batch norm over ranks: outputs, gradients and running statistics are those of one process with all samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from unisono.dist import JobSpec, World
from unisono.errors import PlanError
from unisono.parallel.batch_norm import apply_sync_batch_norm, check_batch_norm
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan

SIZES = (5, 1, 3)  # samples of each rank


class Net(nn.Module):
    """All three kinds, with and without affine weights and momentum; images [B, 3, 6, 6]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.flat = nn.BatchNorm2d(4)
        self.deep = nn.BatchNorm3d(2, affine=False, momentum=0.3)
        self.mix = nn.Linear(64, 5)
        self.last = nn.BatchNorm1d(5, momentum=None)

    def forward(self, image: Tensor) -> Tensor:
        x = self.flat(self.conv(image)).relu()  # [B, 4, 4, 4]
        x = self.deep(x.unflatten(1, (2, 2))).flatten(1)
        return self.last(self.mix(x)).tanh()


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = 7 + torch.randn(2, sum(SIZES), 3, 6, 6, generator=generator, dtype=torch.float64)
    return image, torch.randn(sum(SIZES), 5, generator=generator, dtype=torch.float64)


def trained(world: World, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Outputs of this rank's rows, gradients of the summed loss, buffers, after two passes, and what evaluation gives."""
    model = Net()
    with torch.no_grad():
        model.flat.weight.uniform_(0.5, 2)
        model.flat.bias.uniform_(-1, 1)
    model.to(dtype)
    if world.group is not None:
        apply_sync_batch_norm(model, world.group)
    images, factors = samples()
    start = sum(sizes[: world.rank])
    mine = slice(start, start + sizes[world.rank])
    out = {}
    for number, image in enumerate(images.to(dtype)):
        image = image[mine].clone().requires_grad_()
        y = model(image)
        (y * factors[mine].to(dtype)).sum().backward()
        out[f"rows/y{number}"], out[f"rows/x{number}"] = y.detach(), image.grad
    out |= {f"sum/{name}": p.grad for name, p in model.named_parameters()}
    out |= {f"same/{name}": buffer for name, buffer in model.named_buffers()}
    out["rows/eval"] = model.eval()(images[0].to(dtype)[mine]).detach()
    assert out["rows/y0"].dtype == out["rows/x0"].dtype == dtype
    return {name: tensor.double().numpy() for name, tensor in out.items()}


@pytest.mark.parametrize("sizes", [(5, 4), SIZES, (9, 0)], ids=str)
def test_many_ranks_are_one_process(pool: Pool, sizes: tuple[int, ...]) -> None:
    alone = trained(World(JobSpec()), (sum(sizes),), torch.float64)
    together = pool.run(trained, sizes, torch.float64, ranks=len(sizes))
    assert alone["same/last.num_batches_tracked"] == 2
    for name, expected in alone.items():
        kind = name.partition("/")[0]
        found = [outcome[name] for outcome in together]
        if kind == "rows":
            found = [np.concatenate(found)]
        elif kind == "sum":
            found = [np.sum(found, axis=0)]
        for each in found:
            np.testing.assert_allclose(each, expected, rtol=1e-9, atol=1e-9, err_msg=name)


def test_precisions_and_layouts(pool: Pool) -> None:
    """float32 far from 0 keeps its digits; bf16 comes back as bf16."""
    expected = trained(World(JobSpec()), (9,), torch.float64)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 0.2)):
        found = pool.run(trained, (5, 4), dtype, ranks=2)
        y = np.concatenate([each["rows/y0"] for each in found])
        np.testing.assert_allclose(y, expected["rows/y0"], rtol=0, atol=tolerance)
    assert pool.run(layout_kept, ranks=2) == [True, True]


def layout_kept(world: World) -> bool:
    norm = nn.BatchNorm2d(4)
    assert world.group is not None
    apply_sync_batch_norm(norm, world.group)
    x = torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    y = norm(x)
    y.square().sum().backward()
    assert x.grad is not None
    return all(t.is_contiguous(memory_format=torch.channels_last) for t in (y, x.grad))


def test_plans_that_could_not_meet() -> None:
    model = Net()

    def check(ranks: int, **options: object) -> None:
        check_batch_norm(model, derive_plan(PlanOptions(**options), world_size=ranks, device="cpu", native_bf16=False))

    check(1, global_batch=7, compile="model")
    check(2, global_batch=8)
    with pytest.raises(PlanError) as caught:
        check(2, global_batch=7, compile="model")
    assert str(caught.value) == (
        "2 problems\n"
        "1. 3 batch norms in Net on 2 data ranks with global_batch 7\n"
        "  rule: their statistics are of all ranks, which run the same passes: global_batch is a multiple of the ranks\n"
        "  so:   a rank that is done would keep the others waiting\n"
        "  try:  plan.global_batch=6, or group norms\n"
        "2. 3 batch norms in Net on 2 data ranks with compile 'model'\n"
        "  rule: sums of statistics between ranks are not traced by the compiler\n"
        "  so:   the graph would break at each of them\n"
        "  try:  compile='off', or group norms"
    )


def recomputed(world: World, recompute: str) -> dict[str, list]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3)))
    if world.group is not None:
        apply_sync_batch_norm(model, world.group)
    options = PlanOptions(device="cpu", recompute=recompute)
    parallelize(derive_plan(options, world_size=1, device="cpu", native_bf16=False), model).model.train()
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(2):
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()
    found = {**dict(model.named_buffers()), **{name: p.grad for name, p in model.named_parameters()}}
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_recomputed_blocks_count_a_batch_once(pool: Pool, ranks: int, recompute: str) -> None:
    plain, again = (pool.run(recomputed, choice, ranks=ranks) for choice in ("none", recompute))
    for expected, found in zip(plain, again, strict=True):
        assert expected["0.1.num_batches_tracked"] == 2
        assert found == expected
