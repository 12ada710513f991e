from __future__ import annotations

import pytest
import torch
import xxhash
from states import bits, large_state, mixed_state

from unisono.checkpoint.host_snapshot import PAGE_BYTES, HostBuffer, HostSnapshot
from unisono.checkpoint.safetensors_format import parse_header
from unisono.checkpoint.shard_assignment import lay_out_shard


def image_of(state):
    shard = lay_out_shard(
        {name: (tuple(each.shape), each.dtype) for name, each in state.items()}, {}, {}, rank=0, world_size=1
    )
    return HostSnapshot(shard, state, HostBuffer())


def read(image):
    """(all bytes, their digest as the image counted it)"""
    running = xxhash.xxh3_128()
    content = b"".join(bytes(block) for block in image.blocks(running))
    return content, running.hexdigest()


def test_the_file_holds_every_bit_of_every_tensor():
    state = mixed_state() | large_state()
    expected = {name: bits(tensor) for name, tensor in state.items()}
    content, digest = read(image_of(state))
    assert xxhash.xxh3_128_hexdigest(content) == digest
    length = int.from_bytes(content[:8], "little")
    extents = parse_header(content[8 : 8 + length], len(content))
    assert {
        name: f"{each.dtype} {list(each.shape)} ".encode() + content[each.begin : each.end]
        for name, each in extents.items()
    } == expected


def test_part_of_a_tensor_is_its_rows():
    state = {"w": torch.randn(3000, 1000), "v": torch.randn(7)}
    shard = lay_out_shard(
        {"w": ((3000, 1000), torch.float32), "v": ((7,), torch.float32)}, {}, {}, rank=1, world_size=2
    )
    (cut,) = (piece for piece in shard.pieces if piece.name == "w")
    content, _ = read(HostSnapshot(shard, state, HostBuffer()))
    assert content[cut.begin : cut.end] == state["w"][cut.index].numpy().tobytes()


def test_staging_a_parameter_leaves_autograd_alone():
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    image = image_of({"p": parameter, "again": parameter * 2})
    assert not image._staged.requires_grad
    read(image)


def test_everything_may_change_at_once():
    state = mixed_state() | large_state()
    expected = read(image_of(state))
    image = image_of(state)
    for tensor in state.values():
        tensor.zero_()
    assert read(image) == expected


def test_the_buffer_is_page_aligned_grows_and_is_kept():
    buffer = HostBuffer()
    first = buffer.reserve(10_000, pinned=False)
    assert first.data_ptr() % PAGE_BYTES == 0
    assert buffer.reserve(5_000, pinned=False).data_ptr() == first.data_ptr()
    assert buffer.reserve(2_000_000, pinned=False).numel() == 2_000_000


def test_the_buffer_is_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        assert HostBuffer().reserve(100, pinned=False).device.type == "cpu"


@pytest.mark.gpu
def test_tensors_of_an_accelerator_may_change_as_soon_as_they_are_staged():
    device = torch.accelerator.current_accelerator()
    state = {name: tensor for name, tensor in large_state().items()}
    expected = read(image_of(state))
    there = {name: tensor.to(device) for name, tensor in state.items()}
    image = image_of(there)
    assert image._staged.is_pinned()
    assert image._staged.data_ptr() % PAGE_BYTES == 0
    for tensor in there.values():
        tensor.fill_(float("nan"))
    assert read(image) == expected


def test_an_image_of_nothing_is_a_header():
    content, _ = read(image_of({}))
    assert parse_header(content[8:], len(content)) == {}
