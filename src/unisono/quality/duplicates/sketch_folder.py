"""Chunks of all documents in a folder, which a killed job finds again.

Each chunk of documents is one file, written atomically; a line of ``chunks.jsonl`` names its documents and its digest. The
documents alone determine the chunks, not the number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from unisono.data.loading.subprocess_map import subprocess_map
from unisono.data.loading.worker_pool import allowed_cores
from unisono.data.per_file_arrays import write_array
from unisono.dist.interpreter import module_command
from unisono.errors import UnisonoError
from unisono.quality.cleaning.languages import MAX_CODE
from unisono.quality.cleaning.steps import REASONS, UNREADABLE
from unisono.quality.documents import Document, Documents
from unisono.quality.duplicates.chunks import encode_request, make_chunk, make_image_chunk
from unisono.quality.duplicates.ray_map import ray_map
from unisono.quality.duplicates.sketches import bands_and_rows
from unisono.quality.file_meter import ByteCount
from unisono.quality.options import MASK_KINDS, CleanRecipe, DuplicateOptions
from unisono.quality.progress import SILENT, Progress
from unisono.sanitize import shorten
from unisono.storage.files import file_digest, opener, write_atomically

CHUNK_DOCUMENTS: Final = 4096
CHUNK_BYTES: Final = 16 << 20
_JOURNAL: Final = "chunks.jsonl"
_OPEN_CHUNKS: Final = 64
_FAULT: Final = 300  # characters
_BENCHMARK_HASHES: Final = "benchmark_hashes.npy"
_NO_HASHES: Final = np.zeros(0, np.uint64)
_NONE: Final = np.zeros(0, np.int64)


class Chunk(msgspec.Struct, frozen=True):
    """A line of the journal.

    Attributes:
        documents: Number of documents.
        digest: Of the chunk's file.
        file: Number of the first document's file.
        row: The first document's row in it.
        counts: Number of documents in each file, from that one on.
        faults: Why documents cannot be read, by their place in the chunk.
        end_bytes: Bytes of all files that were read up to its end.
    """

    documents: int
    digest: str
    file: int
    row: int
    counts: list[int]
    faults: dict[int, str] = {}
    end_bytes: int = 0

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(file, first row, number of rows) of each file."""
        for number, count in enumerate(self.counts):
            yield self.file + number, 0 if number else self.row, count


@dataclass(frozen=True, slots=True)
class _Batch:
    """The documents of a chunk, and the bytes of all files that were read up to its end."""

    documents: Sequence[Document]
    end_bytes: int


class Sketches:
    """What is known of documents 0 to n - 1, in the chunks of a folder."""

    def __init__(self, folder: Path, chunks: Sequence[Chunk], options: DuplicateOptions) -> None:
        self._folder = folder
        self._chunks = chunks
        self._begins = np.concatenate(([0], np.cumsum([chunk.documents for chunk in chunks], dtype=np.int64)))
        self.num_bands = 0 if not options.near else bands_and_rows(options.near, options.num_perm)[0]
        self._left_out: dict[int, str] = {}
        self._open = lru_cache(maxsize=_OPEN_CHUNKS)(self._open_chunk)
        self._offsets = lru_cache(maxsize=_OPEN_CHUNKS)(self._read_offsets)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def leave_out(self, faults: Mapping[int, str]) -> None:
        """Take further documents for ones that cannot be read, such as those without a label; ``faults`` says why."""
        self._left_out |= faults

    def digests(self) -> NDArray[np.uint64]:
        """Digests of the texts, uint64 [documents, 2]."""
        return self._all("digests", np.zeros((0, 2), np.uint64))

    def reasons(self) -> NDArray[np.uint8]:
        """Numbers in ``cleaning.steps.REASONS`` of the steps that dropped documents, uint8 [documents]; 0: kept."""
        reasons = self._all("reasons", np.zeros(0, np.uint8))
        reasons[[number for number in self._left_out if not reasons[number]]] = REASONS.index(UNREADABLE)
        return reasons

    def values(self) -> NDArray[np.float64]:
        """What the limits that dropped documents were compared with, float64 [documents]."""
        return self._all("values", np.zeros(0))

    def languages(self) -> NDArray[np.bytes_]:
        """Codes of the documents' languages, bytes [documents]; empty where none was looked for."""
        return self._all("languages", np.zeros((0, MAX_CODE), np.uint8)).view(f"S{MAX_CODE}").reshape(-1)

    def faults(self) -> dict[int, str]:
        """Why documents cannot be read, by their number, in order."""
        found = {
            int(begin) + at: fault
            for begin, number, chunk in zip(self._begins, range(len(self._chunks)), self._chunks, strict=False)
            for at, fault in {**chunk.faults, **self._faults_of_images(number)}.items()
        }
        return dict(sorted({**self._left_out, **found}.items()))

    def _faults_of_images(self, number: int) -> dict[int, str]:
        faults: dict[str, str] = json.loads((self._open(number).metadata() or {}).get("faults", "{}"))
        return {int(at): shorten(fault, _FAULT) for at, fault in faults.items()}

    def masked(self, is_kept: NDArray[np.bool_]) -> dict[str, int]:
        """How many pieces of personal data were replaced in some documents, by kind; only kinds that there were.

        Args:
            is_kept: The documents, bool [documents].
        """
        counts = np.zeros(len(MASK_KINDS), np.int64)
        for number, begin in enumerate(self._begins[:-1].tolist()):
            of_chunk = self._open(number).get_tensor("masked")
            counts += of_chunk[is_kept[begin : begin + len(of_chunk)]].sum(axis=0)
        return {kind: count for kind, count in zip(MASK_KINDS, counts.tolist(), strict=True) if count}

    def changed(self) -> Iterator[tuple[int, bytes]]:
        """Number and new text in UTF-8 of each document that is kept and whose text is another now, in order."""
        for number, begin in enumerate(self._begins[:-1].tolist()):
            chunk = self._open(number)
            texts, offsets = chunk.get_tensor("texts"), chunk.get_tensor("text_offsets").tolist()
            for at, start, stop in zip(chunk.get_tensor("changed").tolist(), offsets, offsets[1:], strict=False):
                yield begin + at, texts[start:stop].tobytes()

    def band(self, band: int) -> NDArray[np.uint64]:
        """Keys of a band, uint64 [documents]."""
        parts = [self._open(number).get_slice("bands")[band] for number in range(len(self._chunks))]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def has_shingles(self) -> NDArray[np.bool_]:
        """Whether a document has any word, bool [documents]."""
        parts = [np.diff(self._offsets(number)) > 0 for number in range(len(self._chunks))]
        return np.concatenate(parts) if parts else np.zeros(0, np.bool_)

    def shingles(self, document: int) -> NDArray[np.uint32]:
        """Sorted hashes of a document's shingles, uint32."""
        number = int(np.searchsorted(self._begins, document, side="right")) - 1
        at = document - int(self._begins[number])
        offsets = self._offsets(number)
        return self._open(number).get_slice("shingles")[int(offsets[at]) : int(offsets[at + 1])]

    def thumbnail(self, document: int) -> NDArray[np.uint8]:
        """Of an image, uint8 [64, 64]."""
        number = int(np.searchsorted(self._begins, document, side="right")) - 1
        return self._open(number).get_slice("thumbnails")[document - int(self._begins[number])]

    def thumbnails_by_chunk(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Thumbnails of the images of each chunk, uint8 [images, 64, 64], and the number of the first one."""
        for number, begin in enumerate(self._begins[:-1].tolist()):
            yield begin, self._open(number).get_tensor("thumbnails")

    def measures_by_chunk(self) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """Measures of the documents of each chunk, float64 [documents, measures], and the number of the first one."""
        for number, begin in enumerate(self._begins[:-1].tolist()):
            yield begin, self._open(number).get_tensor("measures")

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number of the file of each document, and row in it, int64 [documents]."""
        parts = [(file, row, count) for chunk in self._chunks for file, row, count in chunk.runs()]
        file, row, count = (
            (np.array(values, np.int64) for values in zip(*parts, strict=True)) if parts else (_NONE,) * 3
        )
        begins = np.repeat(np.cumsum(count) - count, count)
        return np.repeat(file, count), np.repeat(row, count) + np.arange(len(self)) - begins

    def _all(self, name: str, empty: NDArray[Any]) -> NDArray[Any]:
        parts = [self._open(number).get_tensor(name) for number in range(len(self._chunks))]
        return np.concatenate(parts) if parts else empty

    def _read_offsets(self, number: int) -> NDArray[np.int64]:
        return self._open(number).get_tensor("offsets")

    def _open_chunk(self, number: int) -> Any:
        return safe_open(chunk_path(self._folder, number), framework="numpy")


def sketch_all(
    documents: Documents,
    folder: Path,
    recipe: CleanRecipe,
    *,
    benchmark_hashes: NDArray[np.uint64] | None = None,
    workers: int | str | None = None,
    progress: Progress = SILENT,
) -> Sketches:
    """Clean and sketch all documents into a folder, going on behind the chunks that it holds.

    Args:
        documents: The data set.
        folder: An existing folder, of this job alone.
        recipe: The steps that documents go through, and how they are compared.
        benchmark_hashes: Sorted hashes of the benchmarks' n-grams, uint64.
        workers: Processes; 0 is this one. By default one per core if there is text for at least two. A string is the address
            of a Ray cluster, as ``ray_map`` takes it. The result is the same.
        progress: Receives the bytes of the files whose documents are done.

    Raises:
        DataError: A file is damaged or has changed.
        ExtraError: A package that a step needs is not installed.
        ConfigError: There is no such cluster, or its machines have other versions.
    """
    if workers is None:
        workers = min(allowed_cores(), documents.total_bytes // CHUNK_BYTES)
        workers = workers if workers > 1 else 0
    chunks = list(_finished(folder))
    number = sum(chunk.documents for chunk in chunks)
    hashes = folder / _BENCHMARK_HASHES
    write_array(hashes, _NO_HASHES if benchmark_hashes is None else benchmark_hashes)
    read, told = ByteCount(), chunks[-1].end_bytes if chunks else 0
    progress.begin("reading", documents.total_bytes, "bytes", done=told)
    batches = _batches(islice(documents.read(read.add), number, None), read)
    with (
        open(folder / _JOURNAL, "ab", opener=opener) as journal,
        closing(_chunks(batches, recipe, hashes, _suffixes(documents), workers)) as answers,
    ):
        for batch, content in answers:
            path = chunk_path(folder, len(chunks))
            write_atomically(path, content)
            chunk = _chunk(batch, file_digest(path))
            journal.write(msgspec.json.encode(chunk) + b"\n")
            journal.flush()
            chunks.append(chunk)
            progress.advance(chunk.end_bytes - told)
            told = chunk.end_bytes
    progress.advance(documents.total_bytes - told)  # behind the last document
    return Sketches(folder, chunks, recipe.dedup)


def chunk_path(folder: Path, number: int) -> Path:
    """The file of a chunk."""
    return folder / f"chunk-{number:06d}.safetensors"


def _finished(folder: Path) -> Iterator[Chunk]:
    """The chunks of an earlier job, as far as they are whole. The journal is cut behind them."""
    path = folder / _JOURNAL
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    whole = 0
    for number, line in enumerate(lines):
        try:
            chunk = msgspec.json.decode(line, type=Chunk)
            if not line.endswith(b"\n") or file_digest(chunk_path(folder, number)) != chunk.digest:
                break
        except (msgspec.MsgspecError, OSError):
            break
        whole += len(line)
        yield chunk
    if lines:
        with open(path, "r+b", opener=opener) as file:
            file.truncate(whole)


def _suffixes(documents: Documents) -> list[str] | None:
    """Of the file of each image, in small letters; empty of tables. None of texts."""
    if documents.content != "images":
        return None
    return ["" if file.corpus_entry is None else file.path.suffix.lower() for file in documents.files]


def _chunks(
    batches: Iterable[_Batch], recipe: CleanRecipe, hashes: Path, suffixes: list[str] | None, workers: int | str
) -> Generator[tuple[_Batch, bytes]]:
    """(batch, file) of each chunk; ``suffixes`` are those of the files of images."""
    with_contents = (
        (
            batch,
            [None if document.fault else document.content for document in batch.documents],
            None if suffixes is None else [suffixes[document.file] for document in batch.documents],
        )
        for batch in batches
    )
    if workers == 0:
        benchmark_hashes = np.load(hashes)
        for batch, contents, of_batch in with_contents:
            if of_batch is None:
                yield batch, make_chunk(contents, recipe, benchmark_hashes)
            else:
                yield batch, make_image_chunk(contents, of_batch, recipe)
        return
    requests = ((batch, encode_request(contents, of_batch)) for batch, contents, of_batch in with_contents)
    if isinstance(workers, str):
        yield from ray_map(requests, recipe, np.load(hashes), address=workers, request_bytes=CHUNK_BYTES)
        return
    command = module_command("unisono.quality.duplicates.chunk_worker", json.dumps(asdict(recipe)), str(hashes))
    yield from subprocess_map(requests, command, workers=workers, ahead=2, ended=_ended)


def _batches(documents: Iterable[Document], read: ByteCount) -> Iterator[_Batch]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if len(batch) == CHUNK_DOCUMENTS or size >= CHUNK_BYTES:
            yield _Batch(batch, read.total)
            batch, size = [], 0
    if batch:
        yield _Batch(batch, read.total)


def _chunk(batch: _Batch, digest: str) -> Chunk:
    first = batch.documents[0]
    counts = [0] * (batch.documents[-1].file - first.file + 1)
    for document in batch.documents:
        counts[document.file - first.file] += 1
    faults = {at: shorten(document.fault, _FAULT) for at, document in enumerate(batch.documents) if document.fault}
    return Chunk(
        documents=len(batch.documents),
        digest=digest,
        file=first.file,
        row=first.row,
        counts=counts,
        faults=faults,
        end_bytes=batch.end_bytes,
    )


def _ended(batch: _Batch, code: int) -> UnisonoError:
    return UnisonoError(
        given=f"the process that cleaned {len(batch.documents):,} documents ended with exit code {code}",
        rule="a process runs until all documents are done; its own message, if any, is above",
        consequence="the job stopped; the chunks that are finished are kept",
        nearest="the same command again; -9 often means no memory: fewer --workers",
    )
