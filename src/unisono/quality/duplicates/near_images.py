"""Near-duplicates among images, also those that are a part of another: re-encoded, resized, with another contrast, cropped.

An image is known by its thumbnail, 64 x 64 grey values whatever its aspect ratio. Two steps find out whether two are near:

1. Candidates. The coefficients of the 24 lowest frequencies of the discrete cosine transform (DCT), without the mean, weighted
   by the frequency and of length 1, are compared by their scalar product. All pairs are, by matrix products: there is no index
   that could miss one. For crops the DCT coefficients of 256 windows of a thumbnail are compared with those of the other as a
   whole. Windows have sides of 5/8 to all of the image in steps of 1/8, and places in steps of 1/16. Their coefficients are
   integrals of the basis over the window, so those of all windows of a thumbnail are two small matrix products.
2. Similarity: the correlation of the gradients of both, at 32 x 32 pixels. Gradients tell apart what has the same brightness in
   the same places only, such as skies. The window of a crop is moved first, at its four edges, until the correlation of the grey
   values is highest.

Images without gradients, such as skies, are near nothing but are found if they are exact copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.quality.cleaning.image_checks import THUMBNAIL_PX
from unisono.quality.duplicates.near_duplicates import Duplicates, duplicates_of
from unisono.quality.duplicates.sketch_folder import Sketches
from unisono.quality.options import DuplicateOptions
from unisono.quality.progress import SILENT, Progress

MIN_GRADIENT: Final = (
    1.5  # grey levels a pixel at 32 x 32, root mean square: below that an image has nothing to compare
)
MAX_COMPARED: Final = 64  # candidates whose similarity is looked at, those with the largest scalar products first
_FREQUENCIES: Final = 5
_CANDIDATE: Final = 0.88  # scalar product; 99 of 100 crops of photographs are above it
_COMPARED_PX: Final = 32
_SIZES: Final = (1.0, 0.875, 0.75, 0.625)
_STEP: Final = 1 / 16
_MIN_SIDE: Final = 0.5
_COARSE: Final = 0.5  # correlation of grey values below which a window is not moved
_MOVED: Final = 0.85  # and below which it is no crop after that
_REFINED: Final = 4  # windows that are moved for one image
_BLOCK: Final = 256
_TILE: Final = 8192
_FLOATS = NDArray[np.float32]
_IsCompared = Callable[[int, NDArray[np.int64]], NDArray[np.bool_]]
Edges = tuple[float, float, float, float]  # top, bottom, left, right, from 0 to 1
_WHOLE: Final[Edges] = (0.0, 1.0, 0.0, 1.0)


def near_images(
    sketches: Sketches,
    options: DuplicateOptions,
    excluded: NDArray[np.int64],
    split_of: NDArray[np.int64] | None = None,
    progress: Progress = SILENT,
) -> tuple[Duplicates, int]:
    """Images near one before them; arguments and result are those of ``near_duplicates``."""
    found: list[tuple[int, int, float]] = []
    is_copy = np.zeros(len(sketches), np.bool_)

    def is_compared(image: int, others: NDArray[np.int64]) -> NDArray[np.bool_]:
        return ~is_copy[others] if split_of is None else split_of[others] != split_of[image]

    num_capped = 0
    for image, pairs, is_capped in similar_images(sketches, options, excluded, is_compared, progress):
        if pairs:
            other, similarity = max(pairs, key=lambda pair: (pair[1], -pair[0]))
            found.append((image, other, similarity))
            is_copy[image] = True
        num_capped += is_capped and not pairs
    return duplicates_of(found), num_capped


def similar_images(
    sketches: Sketches,
    options: DuplicateOptions,
    excluded: NDArray[np.int64],
    is_compared: _IsCompared = lambda image, others: np.ones(len(others), np.bool_),
    progress: Progress = SILENT,
) -> Iterator[tuple[int, list[tuple[int, float]], bool]]:
    """Each image that has candidates, in order: those before it that are similar enough, and whether it had too many candidates.

    Args:
        sketches: Of all images.
        options: ``image_near``, the similarity from which on, and ``crops``.
        excluded: Images that are not compared, besides those that a step has dropped.
        is_compared: Whether an image is compared with others before it, bool [others]; asked in order.
        progress: Receives the pairs of images that are compared.
    """
    is_in = sketches.reasons() == 0
    is_in[excluded] = False
    numbers, whole = _coefficients(sketches, is_in)
    progress.begin("comparing", _num_pairs(len(numbers)), "pairs")
    for begin in range(0, len(numbers), _BLOCK):
        end = min(begin + _BLOCK, len(numbers))
        candidates = _candidates(sketches, numbers, whole, begin, end, is_compared, crops=bool(options.crops))
        for image, others in candidates:
            others = others[is_compared(image, others)]  # not one of this block that turned out to be a copy
            if len(others):
                chosen = others[:MAX_COMPARED].tolist()
                yield image, _similar(sketches, image, chosen, options), len(others) > MAX_COMPARED
        progress.advance(_num_pairs(end) - _num_pairs(begin))


def _num_pairs(count: int) -> int:
    return count * (count - 1) // 2


def _coefficients(sketches: Sketches, is_in: NDArray[np.bool_]) -> tuple[NDArray[np.int64], _FLOATS]:
    """Numbers of the images that are compared, ascending, and their DCT coefficients, float32 [images, 24]."""
    numbers: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    coefficients: list[_FLOATS] = [np.zeros((0, _FREQUENCIES**2 - 1), np.float32)]
    shrink = _window(0.0, 1.0)
    for begin, thumbnails in sketches.thumbnails_by_chunk():
        values = thumbnails.astype(np.float32)
        small = shrink @ values @ shrink.T
        squares = (np.diff(small, axis=1) ** 2).mean((1, 2)) + (np.diff(small, axis=2) ** 2).mean((1, 2))
        chosen = np.flatnonzero((squares >= MIN_GRADIENT**2) & is_in[begin : begin + len(values)])
        numbers.append(begin + chosen)
        coefficients.append(_window_coefficients(values[chosen], _dct_basis(crops=False))[:, 0])
    return np.concatenate(numbers), np.concatenate(coefficients)


def _candidates(
    sketches: Sketches,
    numbers: NDArray[np.int64],
    whole: _FLOATS,
    begin: int,
    end: int,
    is_compared: _IsCompared,
    *,
    crops: bool,
) -> list[tuple[int, NDArray[np.int64]]]:
    """The images ``numbers[begin:end]``, each with its candidates before it, the most like it first and not many more than are
    looked at."""
    found: list[list[tuple[float, int]]] = [[] for _ in range(begin, end)]
    block = whole[begin:end, None]
    if crops:
        block = _window_coefficients(_thumbnails(sketches, numbers[begin:end]), _dct_basis(crops=True))
    tile = _BLOCK if crops else _TILE
    for start in range(0, end, tile):
        stop = min(start + tile, end)
        products = (
            (block.reshape(-1, block.shape[-1]) @ whole[start:stop].T).reshape(len(block), -1, stop - start).max(1)
        )
        if crops:
            others = _window_coefficients(_thumbnails(sketches, numbers[start:stop]), _dct_basis(crops=True))
            across = others.reshape(-1, others.shape[-1]) @ whole[begin:end].T
            products = np.maximum(products, across.reshape(stop - start, -1, end - begin).max(1).T)
        products[np.arange(begin, end)[:, None] <= np.arange(start, stop)] = 0.0
        for row in np.flatnonzero((products >= _CANDIDATE).any(1)).tolist():
            columns = np.flatnonzero(products[row] >= _CANDIDATE)
            columns = columns[is_compared(int(numbers[begin + row]), numbers[start + columns])]
            pairs = [*found[row], *zip(products[row, columns].tolist(), numbers[start + columns].tolist(), strict=True)]
            found[row] = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[: MAX_COMPARED + _BLOCK]
    return [
        (int(numbers[begin + row]), np.array([other for _, other in pairs], np.int64))
        for row, pairs in enumerate(found)
        if pairs
    ]


def _similar(sketches: Sketches, image: int, others: list[int], options: DuplicateOptions) -> list[tuple[int, float]]:
    """(other, similarity) of the others that are similar enough to an image."""
    thumbnail = _thumbnails(sketches, np.array([image]))[0]
    similar: list[tuple[int, float]] = []
    parts: list[tuple[float, int, _FLOATS, _FLOATS, Edges]] = []
    for other in others:
        beside = _thumbnails(sketches, np.array([other]))[0]
        similarity = gradient_correlation(_cut(thumbnail, _WHOLE), _cut(beside, _WHOLE))
        if similarity >= options.image_near:
            similar.append((other, similarity))
        elif options.crops:
            for outer, inner in ((thumbnail, beside), (beside, thumbnail)):
                edges = _best_window(outer, inner)
                coarse = _correlation(_cut(outer, edges), _cut(inner, _WHOLE))
                if coarse >= _COARSE:
                    parts.append((coarse, other, outer, inner, edges))
    parts.sort(key=lambda part: (-part[0], part[1]))
    for _, other, outer, inner, edges in parts[:_REFINED]:
        similarity = _crop_similarity(outer, inner, edges)
        if similarity >= options.image_near:
            similar.append((other, similarity))
    return similar


def _crop_similarity(outer: _FLOATS, inner: _FLOATS, edges: Edges) -> float:
    """Similarity of ``inner`` and the window of ``outer`` near ``edges`` that is most like it."""
    target = _cut(inner, _WHOLE)
    grey, edges = _moved(outer, target, edges, _correlation, step=1 / 32)
    return _moved(outer, target, edges, gradient_correlation, step=1 / 64)[0] if grey >= _MOVED else 0.0


def _moved(
    outer: _FLOATS, target: _FLOATS, edges: Edges, likeness: Callable[[_FLOATS, _FLOATS], float], *, step: float
) -> tuple[float, Edges]:
    """The highest likeness and its window, by moving one edge after the other, by ever smaller steps."""
    best = likeness(_cut(outer, edges), target)
    while step >= 1 / 256:
        is_moved = False
        for edge in range(4):
            for change in (-step, step):
                top, bottom, left, right = (*edges[:edge], edges[edge] + change, *edges[edge + 1 :])
                if top < 0 or left < 0 or bottom > 1 or right > 1 or min(bottom - top, right - left) < _MIN_SIDE:
                    continue
                value = likeness(_cut(outer, (top, bottom, left, right)), target)
                if value > best:
                    best, edges, is_moved = value, (top, bottom, left, right), True
        if not is_moved:
            step /= 2
    return best, edges


def _best_window(outer: _FLOATS, inner: _FLOATS) -> Edges:
    """The window of ``outer`` whose DCT coefficients are most like those of ``inner``."""
    windows = _window_coefficients(outer[None], _dct_basis(crops=True))[0]
    best = int(np.argmax(windows @ _window_coefficients(inner[None], _dct_basis(crops=False))[0, 0]))
    intervals = _intervals()
    (top, height), (left, width) = intervals[best // len(intervals)], intervals[best % len(intervals)]
    return top, top + height, left, left + width


def gradient_correlation(first: _FLOATS, second: _FLOATS) -> float:
    """Correlation of the differences of neighbouring pixels of two images, from -1 to 1; 0 without any."""
    return _cosine(_gradients(first), _gradients(second))


def _gradients(image: _FLOATS) -> _FLOATS:
    return np.concatenate((np.diff(image, axis=0)[:, :-1].ravel(), np.diff(image, axis=1)[:-1].ravel()))


def _correlation(first: _FLOATS, second: _FLOATS) -> float:
    return _cosine((first - first.mean()).ravel(), (second - second.mean()).ravel())


def _cosine(first: _FLOATS, second: _FLOATS) -> float:
    length = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / length if length else 0.0


def _thumbnails(sketches: Sketches, numbers: NDArray[np.int64]) -> _FLOATS:
    return np.stack([sketches.thumbnail(number) for number in numbers.tolist()]).astype(np.float32)


def _cut(image: _FLOATS, edges: Edges) -> _FLOATS:
    """A window of a thumbnail as 32 x 32 pixels, each the mean over its field."""
    top, bottom, left, right = edges
    return _window(top, bottom - top) @ image @ _window(left, right - left).T


@cache
def _window(begin: float, size: float) -> Any:
    """Weights of a thumbnail's pixels in those of a window, along one axis, float32 [32, 64]."""
    edges = begin + size * np.arange(_COMPARED_PX + 1) / _COMPARED_PX
    pixels = np.arange(THUMBNAIL_PX + 1) / THUMBNAIL_PX
    low, high = np.maximum(edges[:-1, None], pixels[:-1]), np.minimum(edges[1:, None], pixels[1:])
    weights = np.maximum(high - low, 0.0)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


@cache
def _intervals() -> list[tuple[float, float]]:
    """(begin, size) of the windows along one axis; the first is the whole."""
    return [(step * _STEP, size) for size in _SIZES for step in range(round((1 - size) / _STEP) + 1)]


@cache
def _dct_basis(*, crops: bool) -> Any:
    """Integrals of the cosines over the pixels of a thumbnail, in each interval, float32 [intervals, 5, 64]."""
    rows: list[NDArray[np.float64]] = []
    frequency = np.arange(_FREQUENCIES)[:, None]
    for begin, size in _intervals() if crops else _intervals()[:1]:
        edges = np.clip((np.arange(THUMBNAIL_PX + 1) / THUMBNAIL_PX - begin) / size, 0.0, 1.0)
        waves = np.sin(np.pi * frequency * edges) / np.maximum(np.pi * frequency, 1e-9)
        waves[0] = edges
        rows.append(np.diff(waves, axis=1))
    return np.stack(rows).astype(np.float32)


def _window_coefficients(thumbnails: _FLOATS, basis: _FLOATS) -> _FLOATS:
    """DCT coefficients of all windows, float32 [images, windows, 24], each of length 1."""
    intervals = len(basis)
    flat = basis.reshape(-1, THUMBNAIL_PX)
    products = (flat @ thumbnails @ flat.T).reshape(len(thumbnails), intervals, _FREQUENCIES, intervals, _FREQUENCIES)
    weights = np.hypot(*np.meshgrid(np.arange(_FREQUENCIES), np.arange(_FREQUENCIES))).astype(np.float32)
    values = products.transpose(0, 1, 3, 2, 4) * weights
    values = values.reshape(len(thumbnails), intervals**2, _FREQUENCIES**2)[:, :, 1:]
    return values / np.maximum(np.linalg.norm(values, axis=2, keepdims=True), 1e-6)
