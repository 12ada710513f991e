"""Mixture of experts: equal to a loop over tokens, whatever the split; capacity, balance, and what is counted when."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.models.gpt import GPT
from unisono.models.loss import cross_entropy_sum
from unisono.models.moe import BALANCE_LOSS_WEIGHT, BIAS_UPDATE_RATE, MoE, set_balance_loss_scale, update_router_biases
from unisono.models.options import ModelOptions
from unisono.parallel.transforms import parallelize
from unisono.plan.options import PlanOptions
from unisono.plan.resolve import derive_plan
from unisono.train.build import gpt_flops_per_token

SMALL = {
    "num_layers": 2,
    "dim": 12,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_dim": 20,
    "vocab_size": 32,
    "num_experts": 5,
}


def layer(dtype: torch.dtype = torch.float64, **changes: object) -> MoE:
    torch.manual_seed(0)
    made = MoE(ModelOptions(**{**SMALL, **changes})).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def gpt(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelOptions(**{**SMALL, **changes}))


def by_token(moe: MoE, x: Tensor, k: int, capacity: int | None = None) -> Tensor:
    """The definition: one token, one expert at a time."""
    taken = [0] * moe.experts.num_experts
    made = []
    for token in x.flatten(0, -2):
        scores = (moe.router.weight @ token).softmax(0)
        chosen = sorted(range(len(scores)), key=lambda e: -scores[e].item())[:k]
        total = sum(scores[e] for e in chosen) if k > 1 else 1.0
        out = torch.zeros_like(token)
        for e in chosen:
            taken[e] += 1
            if capacity is not None and taken[e] > capacity:
                continue
            hidden = F.silu(moe.experts.gate[e] @ token) * (moe.experts.up[e] @ token)
            out = out + scores[e] / total * (moe.experts.down[e] @ hidden)
        made.append(out)
    return torch.stack(made).view_as(x)


def gradients(moe: MoE, out: Tensor, x: Tensor) -> list[Tensor]:
    return list(
        torch.autograd.grad(
            (out * torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)).sum(), [x, *moe.parameters()]
        )
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_equals_a_loop_over_tokens(k: int, dtype: torch.dtype) -> None:
    """Also with rows of less than 16 bytes, which the grouped product does not take."""
    close = {"rtol": 1e-5, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for width in (20, 21):
        moe = layer(dtype, num_experts_per_token=k, ffn_dim=width)
        x = torch.randn(2, 9, 12, dtype=dtype, requires_grad=True)
        mine, theirs = moe(x), by_token(moe, x, k)
        torch.testing.assert_close(mine, theirs, **close)
        for here, there in zip(gradients(moe, mine, x), gradients(moe, theirs, x), strict=True):
            torch.testing.assert_close(here, there, **close)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    for dtype in (torch.float64, torch.float32):
        moe = layer(dtype)
        with torch.no_grad():
            moe.router.weight[3] = 0
            # with x[0] = 1 expert 3 is never among two of five
            moe.router.weight[:, 0] = torch.tensor([1.0, 1, 1, -50, 1])
        x = torch.randn(2, 9, 12, dtype=dtype)
        x[..., 0] = 1
        moe(x).square().sum().backward()
        assert not moe.experts.gate.grad[3].any()
        assert moe.experts.gate.grad[[0, 1, 2, 4]].flatten(1).any(1).all()
        assert not moe.experts.down.grad[3].any()
        moe(x[:, :0]).sum().backward()  # no token at all


def test_a_token_does_not_depend_on_the_others() -> None:
    moe = layer()
    x = torch.randn(3, 8, 12, dtype=torch.float64)
    whole = moe(x)
    for part, out in zip(x.split(1), whole.split(1), strict=True):
        torch.testing.assert_close(moe(part[:, 3:5]), out[:, 3:5], rtol=1e-9, atol=1e-12)


def test_two_passes_give_the_same_bits() -> None:
    moe = layer(torch.float32, balance="loss")
    x = torch.randn(4, 33, 12, requires_grad=True)
    first, second = ([out := moe(x), *gradients(moe, out, x)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("factor", "tokens", "limit"), [(1.0, 18, 8), (0.5, 18, 4), (1.1, 25, 11), (10.0, 18, 18)])
def test_an_expert_takes_so_many_tokens_in_order_of_position(factor: float, tokens: int, limit: int) -> None:
    """ceil(factor · tokens · 2 / 5); 1.1 · 10 is 11, not a little more."""
    moe = layer(capacity_factor=factor)
    x = torch.randn(1, tokens, 12, dtype=torch.float64, requires_grad=True)
    mine, theirs = moe(x), by_token(moe, x, 2, limit)
    torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    for here, there in zip(gradients(moe, mine, x), gradients(moe, theirs, x), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-9)
    free = by_token(moe, x, 2)
    assert torch.allclose(mine, free) == (limit == 18)
    torch.testing.assert_close(moe.eval()(x), free, rtol=1e-7, atol=1e-9)  # evaluation drops nothing


def load_of(moe: MoE, x: Tensor) -> Tensor:
    return moe.router(x)[1].flatten().bincount(minlength=5)


def test_bias_moves_against_the_load_and_chooses_only() -> None:
    moe = layer()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    load = load_of(moe, x)
    assert load.unique().numel() > 1
    moe(x).sum().backward()
    assert torch.equal(moe.router.load, load)
    update_router_biases(moe, lambda counts: 3 * counts, torch.tensor(True))
    expected = BIAS_UPDATE_RATE * (load.double().mean() - load).sign()
    torch.testing.assert_close(moe.router.bias, expected)
    assert not moe.router.load.any()

    moe.router.bias.zero_()
    choice = moe.router(x)[1]
    moe.router.bias += torch.tensor([0.0, 0, 0, 9, 9])
    biased, forced = moe.router(x)
    assert set(forced.flatten().tolist()) == {3, 4}
    scores = F.linear(x, moe.router.weight).softmax(-1).gather(-1, forced)
    torch.testing.assert_close(biased, scores / scores.sum(-1, keepdim=True))
    assert not torch.equal(choice, forced)


def test_loads_of_all_ranks_decide_and_a_bad_step_changes_nothing() -> None:
    moe = layer()
    moe.router.load += torch.tensor([0, 0, 0, 0, 5])
    others = torch.tensor([[20, 0, 0, 5, 0]])  # together 20 0 0 5 5, of 6 each
    update_router_biases(moe, lambda counts: counts + others, torch.tensor(True))
    assert moe.router.bias.tolist() == pytest.approx(
        [-BIAS_UPDATE_RATE, BIAS_UPDATE_RATE, BIAS_UPDATE_RATE, BIAS_UPDATE_RATE, BIAS_UPDATE_RATE]
    )
    before = moe.router.bias.clone()
    moe.router.load += 7
    update_router_biases(moe, lambda counts: counts + others, torch.tensor(False))
    assert torch.equal(moe.router.bias, before)
    assert not moe.router.load.any()


def backward(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss, _ = cross_entropy_sum(model(tokens), tokens.roll(-1, 1), torch.ones(tokens.shape))
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_balance_counts_each_pass_once(recompute: str, balance: str) -> None:
    """Two micro-batches and an evaluation; with recompute every block runs twice."""
    plain, model = gpt(balance=balance), gpt(balance=balance)
    options = PlanOptions(device="cpu", recompute=recompute)
    model = parallelize(derive_plan(options, world_size=1, device="cpu", native_bf16=False), model).model
    tokens = torch.randint(0, 32, (4, 11))
    with torch.no_grad():
        model(tokens)
    for micro in tokens.split(2):
        mine, theirs = backward(model, micro), backward(plain, micro)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    if balance == "bias":
        for block, other in zip(model.blocks, plain.blocks, strict=True):
            assert torch.equal(block.ffn.router.load, other.ffn.router.load)
            assert block.ffn.router.load.sum() == 4 * 11 * 2


def sequence_loss(moe: MoE, x: Tensor) -> Tensor:
    """DeepSeek-V3, equations 17 to 20, per sequence times its tokens."""
    total = torch.zeros((), dtype=x.dtype)
    for sequence in x:
        scores = F.linear(sequence, moe.router.weight).softmax(-1)  # [T, E]
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(2).indices, 1)
        share = chosen.mean(0) * 5 / 2
        total = total + BALANCE_LOSS_WEIGHT * len(sequence) * (share.detach() * scores.mean(0)).sum()
    return total


def test_loss_is_that_of_sequences_and_adds_up() -> None:
    moe = layer(balance="loss")
    x = torch.randn(3, 8, 12, dtype=torch.float64, requires_grad=True)
    given = torch.randn(3, 8, 12, dtype=torch.float64)
    set_balance_loss_scale(moe, torch.tensor(0.25))
    mine = torch.autograd.grad((moe(x) * given).sum(), [x, moe.router.weight])
    want = torch.autograd.grad(
        (by_token(moe, x, 2) * given).sum() + 0.25 * sequence_loss(moe, x), [x, moe.router.weight]
    )
    without = torch.autograd.grad((by_token(moe, x, 2) * given).sum(), [x, moe.router.weight])
    for here, there, less in zip(mine, want, without, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-9)
        assert not torch.allclose(there, less, rtol=1e-4, atol=1e-6)
    parts = [torch.autograd.grad((moe(x[i : i + 1]) * given[i : i + 1]).sum(), moe.router.weight)[0] for i in range(3)]
    torch.testing.assert_close(sum(parts), mine[1], rtol=1e-6, atol=1e-9)


def test_sequences_cut_over_ranks_have_one_balance() -> None:
    """Two halves of each sequence, with the counts of the whole handed to each."""
    moe = layer(balance="loss")
    x = torch.randn(3, 8, 12, dtype=torch.float64)
    whole = torch.autograd.grad(moe(x).sum(), moe.router.weight)[0]
    counts = torch.stack([s.flatten().bincount(minlength=5) for s in moe.router(x)[1]])  # [B, E]
    moe.router.sum_over_sequence = lambda mine: counts
    halves = [torch.autograd.grad(moe(half).sum(), moe.router.weight)[0] for half in x.chunk(2, dim=1)]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=1e-6, atol=1e-9)


def test_bias_evens_out_an_uneven_router() -> None:
    moe = layer(torch.float32)
    with torch.no_grad():
        moe.router.weight *= 0.02
        moe.router.weight[0, 0] = 0.3
    x = torch.randn(4, 64, 12)
    x[..., 0] = 1
    before = load_of(moe, x)
    for _ in range(150):
        moe.router(x)[0].sum().backward()
        update_router_biases(moe, lambda counts: counts, torch.tensor(True))
    after = load_of(moe, x)
    assert before.max() > 2 * before.float().mean()
    assert after.max() < 1.2 * after.float().mean()


def test_router_is_float32_under_autocast() -> None:
    moe = layer(torch.float32)
    x = torch.randn(2, 9, 12)
    with torch.autocast("cpu", torch.bfloat16):
        weights, choice = moe.router(x)
        out = moe(x.bfloat16())
    plain, chosen = moe.router(x)
    assert torch.equal(weights, plain)
    assert torch.equal(choice, chosen)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), moe(x), rtol=0.1, atol=0.15)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_an_accelerator(dtype: torch.dtype) -> None:
    """Like the CPU in float32, with an expert that no token goes to; twice the same bits."""
    device = torch.accelerator.current_accelerator()
    moe = layer(torch.float32, dim=32, ffn_dim=64)
    x = torch.randn(4, 40, 32)
    with torch.no_grad():
        x[..., 0] = 1
        moe.router.weight[:, 0] = torch.tensor([1.0, 1, 1, -50, 1])
    x.requires_grad_()
    want = [out := moe(x), *gradients(moe, out, x)]
    moe, there = moe.to(device), x.detach().to(device).requires_grad_()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        first, second = ([out := moe(there), *gradients(moe, out, there)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not first[3][3].any()
    for here, expected in zip(first, want, strict=True):
        error = (here.float().cpu() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 3e-2)


def test_names_shapes_and_state() -> None:
    model = gpt()
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if "blocks.1.ffn." in name}
    assert shapes == {
        "blocks.1.ffn.router.weight": [5, 12],
        "blocks.1.ffn.experts.gate": [5, 20, 12],
        "blocks.1.ffn.experts.up": [5, 20, 12],
        "blocks.1.ffn.experts.down": [5, 12, 20],
    }
    assert model.blocks[0].ffn.experts.down.std().item() == pytest.approx(0.02 / 2, rel=0.1)
    extra = model.state_dict().keys() - dict(model.named_parameters()).keys()
    assert extra == {"blocks.0.ffn.router.bias", "blocks.1.ffn.router.bias"}
    assert not gpt(balance="loss").state_dict().keys() - dict(gpt().named_parameters()).keys()


def test_only_the_experts_a_token_meets_count_as_work() -> None:
    """A dense model whose feed-forward layer is two experts wide does the same work, but for the routers."""
    wide = gpt(num_experts=0, ffn_dim=40)
    assert gpt_flops_per_token(gpt(), 16) == gpt_flops_per_token(wide, 16) + 6 * 2 * 5 * 12
    assert gpt_flops_per_token(gpt(num_experts_per_token=5), 16) > gpt_flops_per_token(gpt(), 16)


def test_the_work_of_attention_follows_the_width_of_its_heads() -> None:
    """Twice the width is as much work of products with tokens, beside the matrices."""
    narrow, wide = (gpt(num_experts=0, ffn_dim=40, head_dim=width) for width in (6, 12))
    work = [gpt_flops_per_token(model, 32) - gpt_flops_per_token(model, 16) for model in (narrow, wide)]
    assert work[1] == 2 * work[0]


def test_settings_that_do_not_fit() -> None:
    found = dict(ModelOptions(**{**SMALL, "num_experts_per_token": 6}).problems())
    assert str(found["num_experts_per_token"]) == (
        "num_experts_per_token 6 with num_experts 5\n"
        "  rule: a token goes to different experts\n"
        "  so:   there are not enough to choose from\n"
        "  try:  num_experts_per_token=5, or num_experts=6"
    )
    found = dict(ModelOptions(capacity_factor=1.5, balance="none", num_experts_per_token=1).problems())
    assert found.keys() == {"capacity_factor", "balance", "num_experts_per_token"}
    assert str(found["balance"]) == (
        "balance 'none' with num_experts 0\n"
        "  rule: it says how tokens find their experts\n"
        "  so:   it would change nothing\n"
        "  try:  num_experts=8, or leave balance out"
    )
    assert not list(ModelOptions(**SMALL).problems())
