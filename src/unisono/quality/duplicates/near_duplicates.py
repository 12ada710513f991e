"""Duplicates among sketched documents, and of which documents before them they are copies.

Documents are taken in order. In one data set only those that are near none before them are compared with later ones, so each
duplicate points to a document that is kept: clusters are stars, and no chain of small differences joins documents that have
little in common.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unisono.quality.duplicates.sketch_folder import Sketches
from unisono.quality.duplicates.sketches import MAX_SHINGLES
from unisono.quality.progress import SILENT, Progress

MAX_COMPARED: Final = 100  # documents that one is compared with: the first of ``Buckets.sharing``
# documents of a group that a bucket holds: where more share a band, they share boilerplate, and near ones share other bands too
MAX_BUCKET: Final = 200
MAX_GROUPS: Final = 16  # that a bucket holds
_WHOLE: Final = 1 << 40  # the weight of a bucket, in parts: integers, so that the order of a sum changes nothing
_Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicates:
    """Documents that are copies, in ascending order.

    Attributes:
        document: Their numbers, int64 [duplicates].
        of: Numbers of the documents they are copies of, which come before them, int64 [duplicates].
        similarity: Jaccard similarity of the shingles of both, or correlation of the gradients of two images; 1 if they are the
            same, float64 [duplicates].
        exact: Whether both are the same to the last byte, bool [duplicates].
    """

    document: NDArray[np.int64]
    of: NDArray[np.int64]
    similarity: NDArray[np.float64]
    exact: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.document)

    def select(self, which: NDArray[Any] | slice) -> Duplicates:
        """Some of them: ``which`` is an index of numpy."""
        return Duplicates(
            document=self.document[which], of=self.of[which], similarity=self.similarity[which], exact=self.exact[which]
        )


def merged(*parts: Duplicates) -> Duplicates:
    """All of them, in ascending order."""
    together = Duplicates(
        document=np.concatenate([part.document for part in parts]),
        of=np.concatenate([part.of for part in parts]),
        similarity=np.concatenate([part.similarity for part in parts]),
        exact=np.concatenate([part.exact for part in parts]),
    )
    return together.select(np.argsort(together.document, kind="stable"))


def exact_duplicates(sketches: Sketches) -> Duplicates:
    """Documents with the text of one before them, as copies of the first with that text.

    Those that a step has dropped are left out.
    """
    compared = np.flatnonzero(sketches.reasons() == 0)
    digests = sketches.digests()[compared]
    order = np.lexsort((compared, digests[:, 1], digests[:, 0]))
    digests = digests[order]
    same = _as_before(digests[:, 0]) & _as_before(digests[:, 1])
    leader = order[np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))]
    copies, originals = compared[order[same]], compared[leader[same]]
    found = Duplicates(
        document=copies, of=originals, similarity=np.ones(len(copies)), exact=np.ones(len(copies), np.bool_)
    )
    return found.select(np.argsort(copies))


def redirect_copies(exact: Duplicates, near: Duplicates) -> tuple[Duplicates, Duplicates]:
    """Those of ``exact`` whose original is not in ``near``, and the others, redirected.

    An exact copy of a document that is itself a near-duplicate points to that document's kept original.
    """
    if not len(near):
        return exact, near
    at = np.minimum(np.searchsorted(near.document, exact.of), len(near) - 1)
    is_redirected = near.document[at] == exact.of
    redirected = replace(near.select(at[is_redirected]), document=exact.document[is_redirected])
    return exact.select(~is_redirected), redirected


def near_duplicates(
    sketches: Sketches,
    near: float,
    excluded: _Numbers,
    split_of: _Numbers | None = None,
    progress: Progress = SILENT,
) -> tuple[Duplicates, int]:
    """Documents near one before them.

    Args:
        sketches: Of all documents.
        near: The Jaccard similarity from which on.
        excluded: Documents that are not compared, besides those that a step has dropped: exact copies.
        split_of: Number of each document's split, ascending, int64 [documents]: only documents of different splits are
            compared then, and a duplicate is compared with later documents, too. None: all are of one data set.
        progress: Receives the stages of ``candidates``.

    Returns:
        The duplicates, each with the most similar of those it was compared with; and how many of the other documents were not
        compared with all of their candidates, as there were too many.
    """
    # of splits there are few; all that a bucket knows is of documents that the others are compared with
    buckets = Buckets() if split_of is None else Buckets(max_groups=len(np.unique(split_of)))
    found: list[tuple[int, int, float]] = []
    num_capped = 0
    for document, shared in candidates(sketches, excluded, progress):
        split = None if split_of is None else int(split_of[document])
        others, is_capped = buckets.sharing(shared, without=split)
        best = _most_similar(sketches, document, others[:MAX_COMPARED], near)
        if best is not None:
            found.append((document, *best))
        if best is None or split is not None:
            buckets.add(document, shared, split or 0)
        num_capped += best is None and (is_capped or len(others) > MAX_COMPARED)
    return duplicates_of(found), num_capped


def duplicates_of(found: Sequence[tuple[int, int, float]]) -> Duplicates:
    """Near-duplicates from (document, the one it is near, similarity), in ascending order."""
    documents, of, similarities = zip(*found, strict=True) if found else ((), (), ())
    return Duplicates(
        document=np.array(documents, np.int64),
        of=np.array(of, np.int64),
        similarity=np.array(similarities, np.float64),
        exact=np.zeros(len(found), np.bool_),
    )


class Buckets:
    """Documents by the keys of their bands, a limited number of each, and of each group of documents."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self._max_groups = max_groups
        self._members: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        self._left_out: defaultdict[int, set[int]] = defaultdict(
            set
        )  # groups of documents that a bucket had no room for

    def sharing(self, buckets: Sequence[int], without: int | None = None) -> tuple[list[int], bool]:
        """Documents in any of these buckets, and whether one of these had no room for others.

        A bucket counts the less, the more documents it holds: what many share is boilerplate. Documents that share most, so
        counted, come first, then in order.

        Args:
            buckets: Numbers of buckets.
            without: A group whose documents are left out.
        """
        shared: Counter[int] = Counter()
        is_capped = False
        for bucket in buckets:
            groups = self._members.get(bucket)
            if groups is None:
                continue
            weight = _WHOLE // sum(map(len, groups.values()))
            for group, members in groups.items():
                if group != without:
                    for member in members:
                        shared[member] += weight
            is_capped |= bool(self._left_out.get(bucket, set()) - {without})
        return sorted(shared, key=lambda other: (-shared[other], other)), is_capped

    def add(self, document: int, buckets: Sequence[int], group: int = 0) -> None:
        """Put a document of a group into its buckets, as far as these have room for the group."""
        for bucket in buckets:
            groups = self._members[bucket]
            has_room = group in groups or len(groups) < self._max_groups
            if has_room and len(members := groups.setdefault(group, [])) < MAX_BUCKET:
                members.append(document)
            else:
                self._left_out[bucket].add(group)


def _most_similar(sketches: Sketches, document: int, others: Sequence[int], near: float) -> tuple[int, float] | None:
    """The most similar of other documents, the first of several, and its similarity; None if that is below ``near``."""
    if not others:
        return None
    shingles = sketches.shingles(document)
    similarities = [jaccard(shingles, sketches.shingles(other), near) for other in others]
    best = max(similarities)
    return (others[similarities.index(best)], best) if best >= near else None


def candidates(
    sketches: Sketches, excluded: _Numbers, progress: Progress = SILENT
) -> Iterator[tuple[int, Sequence[int]]]:
    """Each document that shares a band's key with another, in order, and its buckets: one for each key that it shares.

    ``progress`` receives the bands that are grouped, and then the documents that the caller has compared.
    """
    is_compared = sketches.has_shingles() & (sketches.reasons() == 0)
    is_compared[excluded] = False
    compared = np.flatnonzero(is_compared)
    documents: list[_Numbers] = []
    buckets: list[_Numbers] = []
    num_buckets = 0
    progress.begin("grouping", sketches.num_bands, "bands")
    for band in range(sketches.num_bands):
        keys = sketches.band(band)[compared]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        as_before = _as_before(keys)
        shared = as_before | np.append(as_before[1:], np.zeros(len(keys[:1]), np.bool_))
        bucket = np.cumsum(shared & ~as_before) + num_buckets
        documents.append(compared[order[shared]])
        buckets.append(bucket[shared])
        num_buckets = int(bucket[-1]) if len(bucket) else num_buckets
        progress.advance(1)
    if not documents:
        return
    every_document, every_bucket = np.concatenate(documents), np.concatenate(buckets)
    order = np.argsort(every_document, kind="stable")
    every_document, every_bucket = every_document[order], every_bucket[order]
    bounds = [*np.flatnonzero(~_as_before(every_document)).tolist(), len(every_document)]
    progress.begin("comparing", len(bounds) - 1, "documents")
    for begin, end in pairwise(bounds):
        yield int(every_document[begin]), every_bucket[begin:end].tolist()
        progress.advance(1)


def _as_before(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each value is the one before it."""
    return np.concatenate((np.zeros(len(values[:1]), np.bool_), values[1:] == values[:-1]))


def jaccard(first: NDArray[np.uint32], second: NDArray[np.uint32], near: float = 0.0) -> float:
    """Jaccard similarity of two sets of shingles, each sorted and without repetitions; 0 where it cannot reach ``near``.

    Of sets that were cut to their smallest hashes it is estimated from the smallest hashes of their union (bottom-k sketches,
    Cohen and Kaplan 2007).
    """
    short, long = sorted((len(first), len(second)))
    if long == MAX_SHINGLES:
        union = np.union1d(first, second)[:MAX_SHINGLES]
        both = np.intersect1d(np.intersect1d(first, union, assume_unique=True), second, assume_unique=True)
        return len(both) / len(union)
    if short < near * long or not short:
        return 0.0
    common = len(np.intersect1d(first, second, assume_unique=True))
    return common / (short + long - common)
