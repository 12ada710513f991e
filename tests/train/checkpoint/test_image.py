from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
import xxhash
from states import bits, large_state, mixed_state

from unisono.errors import CheckpointError
from unisono.train.checkpoint.image import BLOCK_BYTES, PAGE_BYTES, HostBuffer, Image
from unisono.train.checkpoint.layout import lay_out
from unisono.train.checkpoint.tensorfile import parse_header


def image_of(state, held=()):
    shard = lay_out({name: (tuple(each.shape), each.dtype) for name, each in state.items()}, {}, rank=0, world=1)
    return Image(shard, state, held, HostBuffer())


def read(image, after_block=lambda number: None):
    """(all bytes, their digest as the image counted it); ``after_block`` runs between blocks."""
    running, content = xxhash.xxh3_128(), bytearray()
    for number, block in enumerate(image.blocks(running)):
        content += block
        after_block(number)
    return bytes(content), running.hexdigest()


@pytest.mark.parametrize("held", ["nothing", "everything", "every second"])
def test_the_file_holds_every_bit_of_every_tensor(held):
    state = mixed_state() | large_state()
    names = {"nothing": [], "everything": list(state), "every second": list(state)[::2]}[held]
    expected = {name: bits(tensor) for name, tensor in state.items()}
    content, digest = read(image_of(state, names))
    assert xxhash.xxh3_128_hexdigest(content) == digest
    length = int.from_bytes(content[:8], "little")
    extents = parse_header(content[8 : 8 + length], len(content))
    assert {
        name: f"{each.dtype} {list(each.shape)} ".encode() + content[each.begin : each.end]
        for name, each in extents.items()
    } == expected


def test_released_at_any_moment_and_then_overwritten_the_file_is_the_same():
    state = large_state()
    expected = read(image_of(state))
    num_blocks = -(-len(expected[0]) // BLOCK_BYTES)
    assert num_blocks >= 3
    for moment in range(-1, num_blocks):
        live = {name: tensor.clone() for name, tensor in state.items()}
        image = image_of(live, live)

        def release_and_overwrite(number, image=image, live=live, moment=moment):
            if number == moment:
                image.release()
                for tensor in live.values():
                    tensor.fill_(float("nan"))

        release_and_overwrite(-1)
        assert read(image, release_and_overwrite) == expected, moment


def test_released_by_another_thread_while_blocks_are_read_the_file_is_the_same():
    """Many times, with the switch between threads as fine as Python allows."""
    state = large_state(mib=9)
    expected = read(image_of(state))
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for attempt in range(60):
            live = {name: tensor.clone() for name, tensor in state.items()}
            image, found = image_of(live, live), []
            reader = threading.Thread(target=lambda image=image, found=found: found.append(read(image)))
            reader.start()
            time.sleep(0.0001 * attempt)
            image.release()
            for tensor in live.values():
                tensor.zero_()
            reader.join()
            assert found == [expected], attempt
    finally:
        sys.setswitchinterval(switch_s)


def test_part_of_a_tensor_is_read_from_its_own_memory_and_watched():
    state = {"w": torch.randn(3000, 1000), "v": torch.randn(7)}
    shards = [
        lay_out({"w": ((3000, 1000), torch.float32), "v": ((7,), torch.float32)}, {}, rank=r, world=2) for r in (0, 1)
    ]
    (cut,) = (piece for piece in shards[1].pieces if piece.name == "w")
    held = read(Image(shards[1], state, state, HostBuffer()))
    assert held == read(Image(shards[1], state, [], HostBuffer()))
    assert held[0][cut.begin : cut.end] == state["w"][cut.rows].numpy().tobytes()
    image = Image(shards[1], state, state, HostBuffer())
    state["w"][cut.rows.start + 500].zero_()
    with pytest.raises(CheckpointError, match="a held tensor changed"):
        read(image)


def test_staging_a_parameter_leaves_autograd_alone():
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    image = image_of({"p": parameter, "again": parameter * 2})
    assert not image._staged.requires_grad
    read(image)


def test_what_is_not_held_may_change_at_once():
    state = mixed_state()
    expected = read(image_of(state))
    image = image_of(state)
    for tensor in state.values():
        tensor.zero_()
    assert read(image) == expected


def test_a_held_tensor_that_changes_before_release_is_found_out():
    for name in large_state():
        state = large_state()
        image = image_of(state, state)

        def change(number, tensor=state[name]):
            if number == 0:
                tensor.add_(1)

        with pytest.raises(CheckpointError, match="a held tensor changed while the checkpoint was written"):
            read(image, change)


def test_a_held_tensor_that_changed_just_before_release_is_found_out():
    state = large_state()
    image = image_of(state, state)
    state["optim/rest"].mul_(2)
    image.release()
    with pytest.raises(CheckpointError, match=r"call release\(\) before each optimizer update"):
        read(image)


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_updates_of_held_parameters_and_moments_are_noticed(kind):
    parameter = torch.nn.Parameter(torch.randn(2048, 1024))
    optimizer = torch.optim.AdamW([parameter], **kind)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for tensor in (parameter.detach(), optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["step"]):
        image = image_of({"t": tensor}, ["t"])
        optimizer.step()
        with pytest.raises(CheckpointError, match="a held tensor changed"):
            read(image)


def test_the_buffer_is_page_aligned_grows_and_is_kept():
    buffer = HostBuffer()
    first = buffer.reserve(10_000, pinned=False)
    assert first.data_ptr() % PAGE_BYTES == 0
    assert buffer.reserve(5_000, pinned=False).data_ptr() == first.data_ptr()
    assert buffer.reserve(2_000_000, pinned=False).numel() == 2_000_000


@pytest.mark.gpu
def test_tensors_of_an_accelerator_may_change_as_soon_as_they_are_staged():
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator here")
    device = torch.accelerator.current_accelerator()
    state = {name: tensor for name, tensor in large_state().items()}
    expected = read(image_of(state))
    there = {name: tensor.to(device) for name, tensor in state.items()}
    image = image_of(there, list(there)[::2])
    assert image._staged.is_pinned()
    assert image._staged.data_ptr() % PAGE_BYTES == 0
    for tensor in there.values():
        tensor.fill_(float("nan"))
    assert read(image) == expected


def test_an_image_of_nothing_is_a_header():
    content, _ = read(image_of({}))
    assert parse_header(content[8:], len(content)) == {}
