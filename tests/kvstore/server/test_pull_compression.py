"""A worker and a server that code pulls hold the same bits, whatever is lost, repeated, swapped or started again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono.errors import CommError
from unisono.kvstore.compression import Codec, PowerSGD, find_codec
from unisono.kvstore.server.chunk_payload import CODED, WITH_BASES, raw_bytes, write_chunks
from unisono.kvstore.server.placement import Chunk
from unisono.kvstore.server.pull_compression import PullDecoder, PullEncoder, RequestedChunk
from unisono.kvstore.wire.frame import Frame, Op, payload_views

CODECS = ["fp16", "bf16", "int8", "1bit", "topk:0.125", "2bit:rms*1.5"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WORKER = 3


def codec_of(name: str) -> Codec:
    codec = find_codec(name)
    assert not isinstance(codec, PowerSGD)
    return codec


def chunk(number: int, elements: int, dtype: torch.dtype = torch.float32) -> Chunk:
    return Chunk(number=number, key=f"w{number}", start=0, num_elements=elements, dtype=dtype, row_elements=0, server=0)


def noise(elements: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(dtype)


def served(shadows: PullEncoder, values: Mapping[int, Tensor], chunks: Sequence[Chunk], based: Sequence[int]) -> Frame:
    """The server's answer, as it comes off the wire."""
    asked = [
        RequestedChunk(chunk=c.number, base=base, value=values[c.number].clone(), version=1)
        for c, base in zip(chunks, based, strict=True)
    ]
    answer = shadows.answer(WORKER, asked)
    dtype = str(chunks[0].dtype).removeprefix("torch.")
    parts = [(c.number, raw_bytes(data)) for c, data in zip(chunks, answer.data, strict=True)]
    frame = replace(write_chunks(Op.DATA, parts, dtype=dtype, based=answer.numbers), codec=CODED if answer.coded else 0)
    return replace(frame, payload=memoryview(bytearray(b"".join(payload_views(frame)))))


class Pull:
    """One request of a worker: what it names, and where its values go."""

    def __init__(self, copies: PullDecoder, chunks: Sequence[Chunk]) -> None:
        self.copies, self.chunks, self.based = copies, chunks, copies.bases(chunks)
        self.got = {c.number: torch.empty(c.num_elements, dtype=c.dtype) for c in chunks}

    def served(self, shadows: PullEncoder, values: Mapping[int, Tensor]) -> Frame:
        return served(shadows, values, self.chunks, self.based)

    def take(self, answer: Frame) -> dict[int, Tensor]:
        self.copies.decode(answer, self.chunks, self.based, [raw_bytes(self.got[c.number]) for c in self.chunks])
        return self.got


def same_bits(shadows: PullEncoder, copies: PullDecoder, chunks: Sequence[Chunk]) -> None:
    held = shadows._workers[WORKER].chunks
    for c in chunks:
        assert held[c.number].number == copies._copies[c.number].number
        assert torch.equal(held[c.number].value, copies._copies[c.number].value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_repeated_pulls_come_to_the_value(name: str, dtype: torch.dtype) -> None:
    shadows, copies, chunks = PullEncoder(codec_of(name)), PullDecoder(codec_of(name)), [chunk(0, 3000, dtype)]
    values = {0: noise(3000, 1, dtype)}
    first = Pull(copies, chunks)
    answer = first.served(shadows, values)
    assert answer.codec == 0
    assert torch.equal(first.take(answer)[0], values[0])
    values[0] = values[0] + noise(3000, 2, dtype) * 0.5
    missing = [values[0].double() - first.got[0].double()]
    for _ in range(60):
        pull = Pull(copies, chunks)
        got = pull.take(pull.served(shadows, values))
        same_bits(shadows, copies, chunks)
        missing.append(values[0].double() - got[0].double())
    assert float(missing[-1].norm()) <= 0.05 * float(missing[0].norm())
    if name in ("bf16", "int8"):
        assert float(missing[-1].abs().max()) <= torch.finfo(dtype).eps * float(values[0].abs().max())


def test_a_lost_answer_comes_again_with_the_same_bits() -> None:
    shadows, copies, chunks = (
        PullEncoder(codec_of("int8")),
        PullDecoder(codec_of("int8")),
        [chunk(0, 2000), chunk(1, 5)],
    )
    values = {0: noise(2000, 1), 1: noise(5, 2)}
    first = Pull(copies, chunks)
    first.take(first.served(shadows, values))
    values = {number: each + 1 for number, each in values.items()}
    pull = Pull(copies, chunks)
    lost = pull.served(shadows, values)
    values = {number: each + 1 for number, each in values.items()}  # what others pushed meanwhile
    again = pull.served(shadows, values)
    assert again.codec == CODED
    assert bytes(again.payload) == bytes(lost.payload)
    pull.take(again)
    same_bits(shadows, copies, chunks)
    after = Pull(copies, chunks)
    assert after.served(shadows, values).codec == CODED
    after.take(after.served(shadows, values))
    # an answer in full that was lost is another one in full: it has no code to be kept
    fresh = PullDecoder(codec_of("int8"))
    pull = Pull(fresh, chunks)
    assert pull.served(shadows, values).codec == 0
    assert pull.served(shadows, values).codec == 0


def test_a_number_of_one_server_is_none_of_another() -> None:
    """Else an answer of the new one that was lost would pass for what the worker has of the old one."""
    old, new = PullEncoder(codec_of("int8")), PullEncoder(codec_of("int8"))
    copies, chunks, values = PullDecoder(codec_of("int8")), [chunk(0, 50)], {0: noise(50, 1)}
    first = Pull(copies, chunks)
    first.take(first.served(old, values))
    values = {0: noise(50, 2)}
    again = Pull(copies, chunks)
    assert [again.served(new, values).codec for _ in range(2)] == [0, 0]


def test_whatever_was_lost_is_answered_in_full() -> None:
    shadows, copies, chunks = PullEncoder(codec_of("bf16")), PullDecoder(codec_of("bf16")), [chunk(0, 100)]
    values = {0: noise(100, 1)}

    def pulled(shadows: PullEncoder, copies: PullDecoder) -> int:
        pull = Pull(copies, chunks)
        answer = pull.served(shadows, values)
        pull.take(answer)
        same_bits(shadows, copies, chunks)
        return answer.codec

    assert [pulled(shadows, copies) for _ in range(3)] == [0, CODED, CODED]
    shadows = PullEncoder(codec_of("bf16"))  # the server was started again, or another has its place
    assert [pulled(shadows, copies) for _ in range(2)] == [0, CODED]
    copies = PullDecoder(codec_of("bf16"))  # the worker was
    assert [pulled(shadows, copies) for _ in range(2)] == [0, CODED]
    shadows.drop_worker(WORKER)
    assert [pulled(shadows, copies) for _ in range(2)] == [0, CODED]
    shadows.clear()
    assert [pulled(shadows, copies) for _ in range(2)] == [0, CODED]
    copies.forget()
    assert [pulled(shadows, copies) for _ in range(2)] == [0, CODED]
    late = Pull(copies, chunks)  # a request that is older than what the worker took since
    stale = list(late.based)
    late.take(late.served(shadows, values))
    assert pulled(shadows, copies) == CODED
    assert served(shadows, values, chunks, stale).codec == 0
    assert [pulled(shadows, copies) for _ in range(2)] == [0, CODED]


def test_two_pulls_under_way_in_either_order() -> None:
    for swapped in (False, True):
        shadows, copies, chunks = PullEncoder(codec_of("int8")), PullDecoder(codec_of("int8")), [chunk(0, 2000)]
        values = {0: noise(2000, 1)}
        pull = Pull(copies, chunks)
        pull.take(pull.served(shadows, values))
        pulls = [Pull(copies, chunks), Pull(copies, chunks)]
        assert pulls[0].based[0] != 0
        assert pulls[1].based == [0]
        answers: list[tuple[Pull, Frame]] = []
        for each in reversed(pulls) if swapped else pulls:
            values[0] = values[0] + noise(2000, 3)
            answers.append((each, each.served(shadows, values)))
        assert [answer.codec for _, answer in answers] == ([0, 0] if swapped else [CODED, 0])
        for each, answer in answers:
            got = each.take(answer)
        assert torch.equal(got[0], values[0])
        same_bits(shadows, copies, chunks)


@pytest.mark.parametrize(
    ("name", "start", "end", "dtype"),
    [
        ("fp16", 0.0, 1e5, torch.float32),  # no float16
        ("int8", 0.0, float("nan"), torch.float32),
        ("bf16", float("inf"), 1.0, torch.float32),
        ("int8", 0.0, 1e300, torch.float64),  # its scale is a float32
        ("2bit:rms*1.5", 0.0, 1.0, torch.float32),  # all alike: none is 1.5 times their rms
        ("fp16", 0.0, 1e-9, torch.float32),  # too small for a float16
    ],
)
def test_what_has_no_code_comes_in_full(name: str, start: float, end: float, dtype: torch.dtype) -> None:
    shadows, copies, chunks = (
        PullEncoder(codec_of(name)),
        PullDecoder(codec_of(name)),
        [chunk(0, 40, dtype), chunk(1, 40, dtype)],
    )
    for value in (start, end):
        values = {0: torch.full((40,), value, dtype=dtype), 1: torch.zeros(40, dtype=dtype)}
        pull = Pull(copies, chunks)
        answer = pull.served(shadows, values)
        assert answer.codec == 0  # both chunks: a frame is coded as a whole or not at all
        assert torch.allclose(pull.take(answer)[0], values[0], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(CODECS),
    dtype=st.sampled_from(DTYPES),
    course=st.lists(
        st.tuples(
            st.sampled_from(["push", "pull", "lose", "two", "server", "worker", "lease", "state"]),
            st.sampled_from([(0,), (1,), (0, 1)]),
            st.booleans(),
        ),
        max_size=25,
    ),
)
def test_copy_and_shadow_are_one(
    name: str, dtype: torch.dtype, course: list[tuple[str, tuple[int, ...], bool]]
) -> None:
    shadows, copies = PullEncoder(codec_of(name)), PullDecoder(codec_of(name))
    every = [chunk(0, 70, dtype), chunk(1, 3, dtype)]
    values = {c.number: noise(c.num_elements, c.number, dtype) for c in every}
    for turn, (what, numbers, swapped) in enumerate(course):
        chunks = [every[number] for number in numbers]
        match what:
            case "push":
                for number in numbers:
                    values[number] = values[number] + noise(every[number].num_elements, turn, dtype) * 0.1
            case "pull" | "lose":
                pull = Pull(copies, chunks)
                answer = pull.served(shadows, values)
                if what == "lose":
                    if swapped:  # with the server that gave it
                        shadows = PullEncoder(codec_of(name))
                    answer = pull.served(shadows, values)
                got = pull.take(answer)
                same_bits(shadows, copies, chunks)
                for number in numbers:
                    if answer.codec == 0:
                        assert torch.equal(got[number], values[number])
            case "two":
                pulls = [Pull(copies, every), Pull(copies, chunks)]
                answers = [(each, each.served(shadows, values)) for each in (pulls[::-1] if swapped else pulls)]
                for each, answer in answers:
                    each.take(answer)
                same_bits(shadows, copies, every)
            case "server":
                shadows = PullEncoder(codec_of(name))
            case "worker":
                copies = PullDecoder(codec_of(name))
            case "lease":
                shadows.drop_worker(WORKER)
            case _:
                copies.forget()
                pull = Pull(copies, chunks)
                got = pull.take(pull.served(shadows, values))
                assert all(torch.equal(got[number], values[number]) for number in numbers)


def test_noise_is_the_same_in_a_run_that_is_repeated() -> None:
    def codes() -> list[bytes]:
        shadows, copies, chunks = PullEncoder(codec_of("int8")), PullDecoder(codec_of("int8")), [chunk(0, 2000)]
        found: list[bytes] = []
        for turn in range(3):
            pull = Pull(copies, chunks)
            answer = pull.served(shadows, {0: noise(2000, turn)})
            pull.take(answer)
            found.append(bytes(answer.payload)[16:])  # without the numbers, which no two servers share
        return found

    assert codes() == codes()
    assert len(set(codes())) == 3


def test_an_answer_that_does_not_fit_is_refused() -> None:
    shadows, copies, chunks = PullEncoder(codec_of("int8")), PullDecoder(codec_of("int8")), [chunk(0, 40)]
    pull = Pull(copies, chunks)
    full = pull.served(shadows, {0: noise(40, 1)})
    with pytest.raises(CommError, match="a difference from number 0, in 1 entries") as refused:
        pull.take(replace(full, codec=CODED))
    assert "rule: this worker has number 0" in str(refused.value)
    with pytest.raises(CommError, match="an answer to a pull with 1 chunks and 0 numbers"):
        pull.take(replace(write_chunks(Op.DATA, [(0, raw_bytes(noise(40, 1)))], dtype="float32"), flags=0))
    with pytest.raises(CommError, match="DATA of 1 entries in 8 bytes, whose parts add up to 16"):
        pull.take(Frame(Op.DATA, flags=WITH_BASES, entries=1, payload=memoryview(bytearray(8))))
    pull.take(full)
    other = Pull(copies, chunks)
    coded = other.served(shadows, {0: noise(40, 2)})
    damaged = bytearray(coded.payload)
    damaged[-1] = 0x80  # no int8 code has it
    with pytest.raises(CommError, match="a int8 code of 40 elements: a -128"):
        other.take(replace(coded, payload=memoryview(damaged)))
