"""Every format and mode has defined pixels; damage, bombs and what is not read are DataErrors."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from unisono.data.image import decode, probe
from unisono.data.image.decoding import _simplejpeg
from unisono.errors import DataError, ExtraError

Photo = Callable[..., NDArray[np.uint8]]
Saved = Callable[..., bytes]

LOSSLESS = [
    ("PNG", "RGB"),
    ("PNG", "L"),
    ("PNG", "P"),
    ("PNG", "1"),
    ("PNG", "RGBA"),
    ("PNG", "LA"),
    ("GIF", "P"),
    ("GIF", "L"),
    ("BMP", "RGB"),
    ("BMP", "L"),
    ("PPM", "RGB"),
    ("PPM", "L"),
    ("WebP", "RGB"),
    ("WebP", "RGBA"),
]


@pytest.mark.parametrize(("name", "mode"), LOSSLESS)
def test_lossless_formats_give_pillow_s_pixels(photo: Photo, saved: Saved, name: str, mode: str) -> None:
    data = saved(photo(37, 53), name, mode, **({"lossless": True} if name == "WebP" else {}))
    peer = Image.open(io.BytesIO(data))
    assert np.array_equal(decode(data), np.asarray(peer.convert("RGB")))
    assert np.array_equal(decode(data, color="gray")[:, :, 0], np.asarray(peer.convert("L")))
    info = probe(data)
    assert (info.format, info.width, info.height, info.mode) == (name, 53, 37, peer.mode)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK", "YCCK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_modes(photo: Photo, saved: Saved, mode: str, progressive: bool) -> None:
    pixels = photo(61, 83)
    if mode == "YCCK":  # Adobe's: CMYK stored as luma and chroma
        data = simplejpeg.encode_jpeg(np.dstack([pixels, pixels[:, :, :1]]), colorspace="CMYK", colorsubsampling="444")
    else:
        data = saved(pixels, "JPEG", mode, progressive=progressive)
    for color, into in (("rgb", "RGB"), ("gray", "L")):
        peer = Image.open(io.BytesIO(data))
        if color == "gray":
            peer.draft("L", None)  # the stored luma, and not grey computed from RGB
        got = decode(data, color=color)  # type: ignore[arg-type]
        want = np.asarray(peer.convert(into), np.int16).reshape(got.shape)
        # simplejpeg and Pillow round CMYK to RGB differently
        assert np.abs(got - want).max() <= (2 if "C" in mode else 0)
    info = probe(data)
    assert (info.format, info.mode) == ("JPEG", "CMYK" if "C" in mode else mode)
    assert info.jpeg is not None
    assert info.jpeg.sequential is not (progressive and mode != "YCCK")


def test_probe_reads_sampling_and_restart_interval(photo: Photo, saved: Saved) -> None:
    info = probe(saved(photo(61, 83), "JPEG", subsampling="4:2:0", restart_marker_blocks=3)).jpeg
    assert info is not None
    assert (info.sampling, info.restart_interval, info.mcu) == (((2, 2), (1, 1), (1, 1)), 3, (16, 16))
    assert (info.width, info.height, info.bits, info.frame) == (83, 61, 8, 0xC0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_is_read(photo: Photo, saved: Saved, kind: Callable[[bytes], bytes]) -> None:
    for name in ("JPEG", "PNG"):
        data = saved(photo(20, 30), name)
        assert np.array_equal(decode(kind(data)), decode(data))


def test_arrays_that_are_no_bytes_are_refused() -> None:
    with pytest.raises(DataError, match="an encoded image as 2 dims of 4-byte values"):
        decode(np.zeros((2, 2), np.float32))  # type: ignore[arg-type]


def test_sixteen_bits_keep_their_upper_eight(saved: Saved) -> None:
    values = np.linspace(0, 65535, 40 * 50).reshape(40, 50).astype(np.uint16)
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    assert np.array_equal(decode(out.getvalue(), color="gray")[:, :, 0], values >> 8)
    assert np.array_equal(decode(out.getvalue()), np.repeat((values >> 8)[:, :, None], 3, axis=2))


def test_thirty_two_bits_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        decode(b"P5 2 1 65535\n" + bytes(4))
    assert "a PPM of mode I" in str(caught.value)
    assert "try:  convert it to 8 bits, with the range that is meant" in str(caught.value)


def test_alpha_is_dropped_not_blended(photo: Photo) -> None:
    pixels = photo(20, 30)
    out = io.BytesIO()
    Image.fromarray(np.dstack([pixels, np.zeros((20, 30), np.uint8)])).save(out, "PNG")
    assert np.array_equal(decode(out.getvalue()), pixels)


@pytest.mark.parametrize("name", ["GIF", "WebP", "PNG"])
def test_the_first_picture_of_an_animation_is_decoded(photo: Photo, name: str) -> None:
    frames = [Image.fromarray(photo(20, 30, seed=seed)) for seed in range(3)]
    out = io.BytesIO()
    options = {"lossless": True} if name == "WebP" else {}
    frames[0].save(out, name, save_all=True, append_images=frames[1:], **options)
    first = Image.open(io.BytesIO(out.getvalue()))
    assert np.array_equal(decode(out.getvalue()), np.asarray(first.convert("RGB")))


def test_orientation_is_not_applied(photo: Photo, saved: Saved) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(saved(photo(20, 30), "JPEG", exif=exif)).shape == (20, 30, 3)


@pytest.mark.parametrize(
    ("min_size", "factor"), [((100, 100), 1), ((65, 10), 1), ((60, 80), 2), ((31, 41), 2), ((30, 40), 4), ((1, 1), 8)]
)
def test_min_size_scales_jpeg_by_powers_of_two(
    photo: Photo, saved: Saved, min_size: tuple[int, int], factor: int
) -> None:
    pixels = photo(123, 165)
    data = saved(pixels, "JPEG", quality=95)
    got = decode(data, min_size=min_size)
    assert got.shape == (-(-123 // factor), -(-165 // factor), 3)
    # What is scaled is the same picture: shrink the whole by averaging, and compare
    peer = Image.fromarray(decode(data)).reduce(factor)
    assert np.abs(got.astype(np.int16) - np.asarray(peer, np.int16)).mean() < 4
    assert decode(saved(pixels, "PNG"), min_size=min_size).shape == (123, 165, 3)


def test_sides_below_eight_are_not_scaled(photo: Photo, saved: Saved) -> None:
    assert decode(saved(photo(7, 300), "JPEG"), min_size=(1, 1)).shape == (7, 300, 3)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "WebP", "BMP", "PPM"])
def test_cut_anywhere_is_an_error_or_changes_nothing(photo: Photo, saved: Saved, name: str) -> None:
    """What is cut off behind the last pixel may be missing; no pixel may be."""
    data = saved(photo(24, 40), name)
    whole = decode(data)
    errors = 0
    for size in sorted({*range(0, len(data), max(1, len(data) // 150)), *range(len(data) - 30, len(data))}):
        try:
            got = decode(data[:size])
        except DataError:
            errors += 1
        else:
            assert np.array_equal(got, whole), f"cut to {size} of {len(data)} bytes"
    assert errors > 150


def test_every_flipped_bit_of_a_png_is_found(photo: Photo, saved: Saved) -> None:
    data = saved(photo(6, 5), "PNG")
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataError):
            decode(bytes(flipped))


def test_corrupt_jpeg_is_named(photo: Photo, saved: Saved) -> None:
    data = saved(photo(64, 64), "JPEG")
    with pytest.raises(DataError) as caught:
        decode(data[: len(data) // 2])
    assert str(caught.value) == (
        f"a JPEG of 64x64 pixels in {len(data) // 2} bytes: Premature end of JPEG file\n"
        "  rule: an image is whole, in a format that is read here (JPEG, PNG, WebP, GIF, BMP, PPM)\n"
        "  so:   it was not decoded\n"
        "  try:  a whole copy of the image, or leave the record out when packing"
    )


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "WebP", "BMP", "PPM"])
def test_damage_raises_nothing_but_data_errors(photo: Photo, saved: Saved, name: str) -> None:
    data = saved(photo(24, 40), name)
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        for at in rng.integers(0, min(len(data), 800), rng.integers(1, 6)).tolist():
            damaged[at] = int(rng.integers(0, 256))
        with suppress(DataError):
            decode(bytes(damaged), max_pixels=1 << 16)
        with suppress(DataError):
            probe(bytes(damaged))


HEADS = [
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF89a",
    b"RIFF0000WEBPVP8X",
    b"RIFF0000WEBPVP8L",
    b"BM",
    b"P6 ",
    b"P3 ",
    b"",
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(HEADS), st.binary(max_size=200))
def test_noise_behind_a_signature_raises_nothing_but_data_errors(head: bytes, noise: bytes) -> None:
    for function in (probe, lambda data: decode(data, max_pixels=1 << 16)):
        with suppress(DataError):
            function(head + noise)


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"", "0 bytes that begin with nothing"),
        (b"II*\x00" + bytes(40), "44 bytes that begin with 49 49 2a 00 00 00 00 00"),  # TIFF
        (b"%!PS-Adobe-3.0 EPSF", "19 bytes that begin with 25 21 50 53"),
        (b"\xff\xd8\xff\xe0\x00\x01", "byte 2: a segment of 1 bytes where 2 are left"),
        (b"\xff\xd8\xff\xc0\x00\x0b\x08\x00\x00\x00\x10\x01\x01\x11\x00", "byte 2: a frame of 16x0 pixels"),
        (b"\xff\xd8\xff\xda\x00\x02", "byte 2: a scan before any frame"),
    ],
)
def test_what_is_not_read(data: bytes, shown: str) -> None:
    for function in (probe, decode):
        with pytest.raises(DataError) as caught:
            function(data)
        assert shown in str(caught.value)


def png_of(width: int, height: int) -> bytes:
    """A whole PNG whose pixels are zeros, compressed about a thousandfold."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    body = zlib.compress(bytes(min(height, 2000) * (width + 1)), 9)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def bombs(photo: Photo, saved: Saved) -> dict[str, bytes]:
    jpeg = bytearray(saved(photo(16, 16), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 50000, 50000)
    gif = bytearray(saved(photo(16, 16), "GIF"))
    gif[6:10] = struct.pack("<HH", 50000, 50000)
    frame = bytearray(saved(photo(16, 16), "GIF"))  # a small screen, and a picture larger than it
    at = frame.index(b"\x2c\x00\x00\x00\x00\x10\x00\x10\x00") + 5
    frame[at : at + 4] = struct.pack("<HH", 50000, 50000)
    bmp = bytearray(saved(photo(16, 16), "BMP"))
    bmp[18:26] = struct.pack("<ii", 50000, -50000)
    webp = b"RIFF\x16\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00" + bytes(4) + b"\x4f\xc3\x00" * 2 + bytes(20)
    return {
        "JPEG": bytes(jpeg),
        "PNG": png_of(50000, 50000),
        "GIF": bytes(gif),
        "GIF frame": bytes(frame),
        "BMP": bytes(bmp),
        "WebP": webp,
        "PPM": b"P6 50000 50000 255\n" + bytes(100),
    }


def test_bombs_are_refused_by_their_size(photo: Photo, saved: Saved) -> None:
    for name, data in bombs(photo, saved).items():
        with pytest.raises(DataError) as caught:
            decode(data)
        if name != "GIF frame":
            assert str(caught.value) == (
                "an image of 50000x50000 = 2500000000 pixels\n"
                "  rule: at most max_pixels = 67108864 pixels are decoded, whatever a header asks for\n"
                "  so:   nothing was allocated\n"
                "  try:  max_pixels= higher, if the image is meant; else leave it out, it may be a decompression bomb"
            )


def test_bombs_take_no_memory(photo: Photo, saved: Saved) -> None:
    program = """
        import resource, sys
        from unisono.data.image import decode
        from unisono.errors import DataError
        jpeg, png, *rest = sys.stdin.buffer.read().split(b"|||")
        decode(jpeg), decode(png)                        # whatever is loaded on first use is loaded now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for data in rest:
            for _ in range(3):
                try:
                    decode(data)
                except DataError:
                    continue
                raise SystemExit("decoded a bomb")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        sys.exit(0 if grown < 16_000 else f"grew by {grown} KiB")
    """
    small = saved(photo(8, 8), "JPEG") + b"|||" + saved(photo(8, 8), "PNG")
    content = b"|||".join([small, *bombs(photo, saved).values()])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], input=content, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_jpeg_of_endless_scans_is_refused(photo: Photo, saved: Saved) -> None:
    data = saved(photo(64, 64), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    with pytest.raises(DataError, match=r"a JPEG of 51\d scans, where 200 are the limit"):
        decode(data[:-2] + data[last:-2] * 500 + data[-2:])


def test_the_cap_is_the_caller_s(photo: Photo, saved: Saved) -> None:
    for name in ("JPEG", "PNG", "PPM"):
        data = saved(photo(20, 30), name)
        assert decode(data, max_pixels=600).shape == (20, 30, 3)
        with pytest.raises(DataError, match="an image of 30x20 = 600 pixels"):
            decode(data, max_pixels=599)


def test_without_simplejpeg(photo: Photo, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(photo(20, 30), "JPEG")
    _simplejpeg.cache_clear()
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ExtraError, match=r"pip install 'unisono\[images\]'"):
        decode(data)
    assert probe(data).width == 30  # headers need no library
