"""The shuffled order of samples: a keyed bijection of ``[0, size)`` per epoch, computed from the position alone.

Position ``p`` of a run is sample ``permutation(p)``, for ``p`` up to 2^63, in O(1) memory. Resuming at any step on any number
of ranks is therefore arithmetic. The epoch of a position is ``p // size``; the positions of one step may span several epochs.

The bijection is a generalised Feistel network. A position is split into two halves of about √size values; each round adds a keyed
hash of one half to the other, modulo its size. The network's domain exceeds ``size`` by at most √size values; a result outside
goes through the network again until it is inside. A run's meaning depends on the order: golden values in the tests fix keys and
rounds, and 64-bit integer arithmetic makes every platform compute the same.

Sources: Black and Rogaway 2002 (generalised Feistel cipher, cycle walking); Steele, Lea and Flood 2014 (the splitmix64
finaliser); Lemire 2019 (scaling a hash to a range by multiplication).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError

Words = NDArray[np.uint64]

_ROUNDS = 6
_ROUNDS_TINY = 16  # for halves of a few values, six rounds are measurably not uniform (sizes up to 300)
_TINY = 1024
_CHUNK = 1 << 14  # positions per pass: the temporaries stay in the second-level cache

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)

# Purposes of keys: two uses with the same seed and epoch never share a key.
_SAMPLES, _BLOCKS, _INSIDE, _AUGMENT, _PAIR, _UNIFORM = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, slots=True)
class Permutation:
    """Sample ids for global positions; a pure function of (size, seed, block, position).

    Position p is place p mod ``size`` of epoch p // ``size``, and each epoch has another order.

    Attributes:
        size: Number of samples, from 1 to 2^62 - 1.
        seed: Any integer, taken modulo 2^64.
        block_size: Above 0, keeps runs of that many neighbouring samples together, for storage that is slow at random
            access: blocks are permuted, and samples within each block. The last, shorter block is permuted like the
            others.

    Raises:
        DataError: ``size`` is out of range, or ``block_size`` is negative.
    """

    size: int
    seed: int = field(kw_only=True)
    block_size: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not 1 <= self.size < 1 << 62:
            raise DataError(
                given=f"an order over {self.size} samples",
                rule="1 <= size < 2^62",
                consequence="there is no position to compute",
                nearest="a dataset with at least one sample",
            )
        if self.block_size < 0:
            raise DataError(
                given=f"block {self.block_size}",
                rule="block >= 0",
                consequence="there is no order",
                nearest="0, which shuffles every sample on its own",
            )

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample ids, int64, same shape as ``positions`` (global, >= 0)."""
        flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
        if flat.size and int(flat.min()) < 0:
            raise IndexError(f"position {int(flat.min())} is negative")
        out = np.empty(flat.size, np.int64)
        for low in range(0, flat.size, _CHUNK):
            part = flat[low : low + _CHUNK]
            epochs = part // self.size
            places = part - epochs * self.size
            out[low : low + _CHUNK] = self._sample(_words(epochs), _words(places)).view(np.int64)
        return out.reshape(np.shape(positions))

    def position_of(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Global position of each of ``samples`` in ``epoch``: the inverse of calling the permutation."""
        flat = np.ascontiguousarray(samples, dtype=np.int64).reshape(-1)
        if flat.size and not (int(flat.min()) >= 0 and int(flat.max()) < self.size):
            raise IndexError(f"sample ids lie in [0, {self.size})")
        out = np.empty(flat.size, np.int64)
        for low in range(0, flat.size, _CHUNK):
            part = flat[low : low + _CHUNK]
            epochs = np.full(part.size, epoch, np.int64)
            out[low : low + _CHUNK] = self._place(_words(epochs), _words(part)).view(np.int64)
        return (out + epoch * self.size).reshape(np.shape(samples))

    @property
    def _num_blocks(self) -> int:
        return -(-self.size // self.block_size)

    @property
    def _blockwise(self) -> bool:
        return 0 < self.block_size < self.size

    def _sample(self, epochs: Words, places: Words) -> Words:
        if not self._blockwise:
            return _permute(places, self.size, _round_keys(self.size, self.seed, _SAMPLES, epochs))
        block_keys = _round_keys(self._num_blocks, self.seed, _BLOCKS, epochs)
        short = self.size - (self._num_blocks - 1) * self.block_size  # samples of the last block
        if short < self.block_size:
            # Positions behind the short block in this epoch are computed as if that block were full.
            turn = self._turn_of_last(epochs, block_keys)
            behind = places >= turn * np.uint64(self.block_size) + np.uint64(short)
            places = places + behind * np.uint64(self.block_size - short)
        turn, inside = np.divmod(places, np.uint64(self.block_size))
        block = _permute(turn, self._num_blocks, block_keys)
        return block * np.uint64(self.block_size) + self._inside(epochs, block, inside)

    def _place(self, epochs: Words, samples: Words) -> Words:
        if not self._blockwise:
            return _permute(samples, self.size, _round_keys(self.size, self.seed, _SAMPLES, epochs), inverse=True)
        block_keys = _round_keys(self._num_blocks, self.seed, _BLOCKS, epochs)
        block, inside = np.divmod(samples, np.uint64(self.block_size))
        turn = _permute(block, self._num_blocks, block_keys, inverse=True)
        missing = self._num_blocks * self.block_size - self.size
        behind = turn > self._turn_of_last(epochs, block_keys)
        return (
            turn * np.uint64(self.block_size)
            + self._inside(epochs, block, inside, inverse=True)
            - behind * np.uint64(missing)
        )

    def _turn_of_last(self, epochs: Words, block_keys: Words) -> Words:
        last = np.full(block_keys.shape[1], self._num_blocks - 1, np.uint64)
        return np.broadcast_to(_permute(last, self._num_blocks, block_keys, inverse=True), epochs.shape)

    def _inside(self, epochs: Words, block: Words, inside: Words, *, inverse: bool = False) -> Words:
        in_last = block == np.uint64(self._num_blocks - 1)
        out = np.empty_like(inside)
        for members, size in (
            (np.flatnonzero(~in_last), self.block_size),
            (np.flatnonzero(in_last), self.size - (self._num_blocks - 1) * self.block_size),
        ):
            if members.size:
                keys = _round_keys(size, self.seed, _INSIDE, epochs[members], block[members])
                out[members] = _permute(inside[members], size, keys, inverse=inverse)
        return out


def sample_generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The random generator of one sample in one epoch: counter-based (Philox), the same on any rank, after any resume."""
    return next(sample_generators(seed, np.array([epoch]), np.array([sample])))


def sample_generators(
    seed: int, epochs: NDArray[np.int64], samples: NDArray[np.int64]
) -> Iterator[np.random.Generator]:
    """``sample_generator`` of each epoch and sample. All are one object with a new key: each is valid until the next is
    requested. Creating a generator takes six times as long."""
    keys = np.stack([_fold(seed, _AUGMENT, _words(epochs)), _words(samples)], axis=1)
    bits = np.random.Philox(key=0)
    generator = np.random.Generator(bits)
    start = bits.state
    for key in keys:
        start["state"]["key"] = key
        bits.state = start
        yield generator


def pair_generator(seed: int, pair: int) -> np.random.Generator:
    """The random generator of one pair of neighbours in the global order, for pair transforms."""
    key = _fold(seed, _PAIR, np.array([pair], np.uint64))
    return np.random.Generator(np.random.Philox(key=np.array([key[0], pair], np.uint64)))


def keyed_uniform(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """A float64 in [0, 1) for each of ``numbers``, keyed by ``seed``."""
    return (_fold(seed, _UNIFORM, _words(numbers.reshape(-1))) >> np.uint64(11)).astype(np.float64).reshape(
        numbers.shape
    ) * 2.0**-53


def _words(values: NDArray[np.int64]) -> Words:
    return values.view(np.uint64)


def _mix(words: Words) -> Words:
    """The splitmix64 finaliser; wraps modulo 2^64."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _fold(seed: int, purpose: int, *parts: Words) -> Words:
    """One key word per element of ``parts``: h = mix((h ^ part) + golden) over seed, purpose and parts, from h = 0."""
    start = np.array([seed % (1 << 64)], np.uint64)
    words = _mix(start + _GOLDEN)
    for part in (np.array([purpose], np.uint64), *parts):
        words = _mix((words ^ part) + _GOLDEN)
    return words


def _round_keys(size: int, seed: int, purpose: int, *parts: Words) -> Words:
    """Keys [rounds, n], one column per element of the equally long ``parts``; [rounds, 1] if all elements are equal."""
    changes = np.zeros(parts[0].size - 1, bool)
    for part in parts:
        changes |= part[1:] != part[:-1]
    heads = np.concatenate([[0], np.flatnonzero(changes) + 1])
    words = _fold(seed, purpose, *(part[heads] for part in parts))
    rounds = np.arange(1, 1 + (_ROUNDS if size > _TINY else _ROUNDS_TINY), dtype=np.uint64)[:, None]
    keys = _mix((words[None, :] ^ rounds) + _GOLDEN)
    if heads.size == 1:
        return keys
    return np.repeat(keys, np.diff(heads, append=parts[0].size), axis=1)


def _permute(values: Words, size: int, keys: Words, *, inverse: bool = False) -> Words:
    """The image of each value under the bijection of ``[0, size)`` given by its key column, or under its inverse."""
    high_size = math.isqrt(size - 1) + 1
    low_size = -(-size // high_size)
    out = _feistel(values, high_size, low_size, keys, inverse=inverse)
    outside = np.flatnonzero(out >= np.uint64(size))
    while outside.size:
        outside_keys = keys if keys.shape[1] == 1 else keys[:, outside]
        walked = _feistel(out[outside], high_size, low_size, outside_keys, inverse=inverse)
        out[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return out


def _feistel(values: Words, high_size: int, low_size: int, keys: Words, *, inverse: bool) -> Words:
    """A bijection of ``[0, high_size · low_size)``: even rounds add to the upper half, odd ones to the lower half. Its inverse
    subtracts, in the last round first."""
    high = values // np.uint64(low_size)
    low = values - high * np.uint64(low_size)
    for number in range(len(keys))[:: -1 if inverse else 1]:
        source, target, size = (high, low, low_size) if number % 2 else (low, high, high_size)
        shift = _scramble(source, keys[number], size)
        if inverse:
            target -= shift
            np.minimum(target, target + np.uint64(size), out=target)
        else:
            target += shift
            np.minimum(target, target - np.uint64(size), out=target)  # modulo: below zero wraps to above everything
    return high * np.uint64(low_size) + low


def _scramble(source: Words, key: Words, size: int) -> Words:
    """The round function: a keyed hash of ``source``, scaled to ``[0, size)`` by a multiplication (no division)."""
    words = source ^ key
    words *= _MIX_1
    words ^= words >> _HALF
    words *= _MIX_2
    words >>= _HALF
    words *= np.uint64(size)
    words >>= _HALF
    return words
