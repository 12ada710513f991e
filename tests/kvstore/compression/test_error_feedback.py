"""Nothing is lost: what was sent and what is held back add up to what came in, and skipped steps leave no trace."""

from __future__ import annotations

import pytest
import torch

from unisono.errors import CheckpointError
from unisono.kvstore.compression import Codec, ErrorFeedback, PowerSGD, find_codec

NAMES = ["2bit:0.5", "2bit:rms*1.5", "1bit", "1bit-mxnet:0.5", "topk:0.01", "int8", "fp16", "bf16"]


def codec_of(name: str) -> Codec:
    codec = find_codec(name)
    assert not isinstance(codec, PowerSGD)
    return codec


def gradients(steps: int, numel: int = 3000) -> torch.Tensor:
    return torch.randn(steps, numel, generator=torch.Generator().manual_seed(steps))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sent_and_held_back_add_up(name: str, dtype: torch.dtype) -> None:
    codec, given = codec_of(name), gradients(20).to(dtype)
    feedback = ErrorFeedback({"w": given[0]})
    sent = torch.zeros(3000, dtype=torch.float64)
    for gradient in given:
        sent += codec.decode(feedback.encode(codec, "w", gradient), 3000, torch.float64)
        feedback.commit(True)
    total = given.double().sum(0)
    held = feedback.state_dict()["residual/w"].double()
    assert float((sent + held - total).abs().max()) <= (1e-12 if dtype == torch.float64 else 1e-5)
    assert bool(held.any()) or (dtype == torch.bfloat16 and codec.summable is not None)  # these lose nothing


@pytest.mark.parametrize("name", ["2bit:0.5", "1bit-mxnet:0.5", "topk:0.01"])
def test_they_add_up_exactly_where_arithmetic_is_exact(name: str) -> None:
    codec, given = codec_of(name), (gradients(20) * 64).round() / 64
    feedback = ErrorFeedback({"w": given[0]})
    sent = torch.zeros(3000)
    for gradient in given:
        sent += codec.decode(feedback.encode(codec, "w", gradient), 3000, torch.float32)
        feedback.commit(True)
    assert torch.equal(sent + feedback.state_dict()["residual/w"], given.sum(0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 7.0])
def test_a_skipped_step_leaves_no_trace(name: str, bad: float) -> None:
    codec, given = codec_of(name), gradients(3)
    feedback = ErrorFeedback({"w": given[0]})
    feedback.encode(codec, "w", given[0])
    feedback.commit(torch.tensor(True))
    before = feedback.state_dict()["residual/w"].clone()
    given[1, 5] = bad
    feedback.encode(codec, "w", given[1])
    feedback.commit(torch.tensor(False))
    assert torch.equal(feedback.state_dict()["residual/w"], before)
    feedback.encode(codec, "w", given[2])
    feedback.commit(torch.tensor(True))
    after = feedback.state_dict()["residual/w"]
    assert after.isfinite().all()
    assert not torch.equal(after, before)


@pytest.mark.parametrize("name", NAMES)
def test_resumed_codes_are_the_codes_of_a_run_that_went_on(name: str) -> None:
    codec, given = codec_of(name), gradients(4)
    first, second = ErrorFeedback({"w": given[0]}, worker=1), ErrorFeedback({"w": given[0]}, worker=1)
    for gradient in given[:2]:
        first.encode(codec, "w", gradient)
        first.commit(True)
    second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
    for gradient in given[2:]:
        codes = [each.encode(codec, "w", gradient) for each in (first, second)]
        assert torch.equal(*codes)
        first.commit(True)
        second.commit(True)


def test_noise_differs_by_worker_name_and_step() -> None:
    codec, gradient = codec_of("int8"), gradients(1)[0]

    def code(worker: int, name: str, step: int) -> bytes:
        feedback = ErrorFeedback({name: gradient}, worker)
        for _ in range(step):
            feedback.commit(True)
        return bytes(feedback.encode(codec, name, gradient).tolist())

    codes = {code(*key) for key in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]}
    assert len(codes) == 4
    assert code(1, "a", 2) == code(1, "a", 2)


def test_any_shape_and_stride() -> None:
    codec, gradient = codec_of("2bit:0.5"), gradients(1)[0].view(60, 50).T
    one, other = ErrorFeedback({"w": gradient}), ErrorFeedback({"w": gradient})
    assert torch.equal(one.encode(codec, "w", gradient), other.encode(codec, "w", gradient.contiguous()))


def test_stats() -> None:
    codec, gradient = codec_of("2bit:0.5"), torch.full((16,), 5.0)
    feedback = ErrorFeedback({"w": gradient, "never": gradient})
    held = []
    for _ in range(3):
        feedback.encode(codec, "w", gradient)
        feedback.commit(True)
        held.append(feedback.stats()["w"]["residual"])
    # a gradient of ten thresholds: nine tenths more are held back with every step
    assert held == pytest.approx([0.9, 1.8, 2.7])
    assert feedback.stats().keys() == {"w"}
    assert feedback.stats()["w"]["bytes_in"] == 64
    assert feedback.stats()["w"]["bytes_out"] == 12


def test_twice_without_a_commit_is_an_error() -> None:
    codec, gradient = codec_of("bf16"), gradients(1)[0]
    feedback = ErrorFeedback({"w": gradient})
    feedback.encode(codec, "w", gradient)
    with pytest.raises(ValueError, match="'w' was sent twice without a commit between"):
        feedback.encode(codec, "w", gradient)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"v": torch.zeros(4)}, "compression state 'v' is [4] torch.float32 in the checkpoint and not used here"),
        (
            {"w": torch.zeros(5)},
            "compression state 'w' is [5] torch.float32 in the checkpoint and [4] torch.float32 here",
        ),
        ({}, "compression state 'w' is missing in the checkpoint and [4] torch.float32 here"),
    ],
)
def test_state_of_other_parameters_is_refused(values: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ErrorFeedback({"w": torch.zeros(4)}).load_state_dict(ErrorFeedback(values).state_dict())
    assert text in str(caught.value)
    assert "nothing was loaded" in str(caught.value)
