"""Reading and writing: whatever goes in comes out, by any way of reading, from threads and forks; whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.recordio import RecordFile, RecordWriter
from unisono.data.recordio.framing import MAGIC_BYTES
from unisono.data.recordio.index import RaggedColumn
from unisono.data.recordio.maintenance import rearrange, verify
from unisono.errors import DataError

PIECES = st.sampled_from([MAGIC_BYTES, MAGIC_BYTES[:2], b"a", b"bcd", b"1234", bytes(4)])
PAYLOADS = st.lists(st.lists(PIECES, max_size=9).map(b"".join), max_size=12)


def write(path: Path, payloads: list[bytes], **options: bool) -> RecordFile:
    with RecordWriter(path, **options) as writer:
        for payload in payloads:
            writer.write(payload)
    return RecordFile(path)


def random_payloads(count: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(int(rng.integers(0, 300))) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(payloads=PAYLOADS, data=st.data())
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], data) -> None:
    folder = tmp_path_factory.mktemp("any")
    records = write(folder / "a.rec", payloads)
    assert len(records) == len(payloads)
    assert list(records) == payloads
    # without sidecar and text index the file alone gives the same
    (folder / "a.uidx").unlink()
    (folder / "a.idx").unlink()
    alone = RecordFile(folder / "a.rec")
    assert list(alone) == payloads
    assert (records.checksums, alone.checksums) == ("written", "computed later")
    if payloads:
        numbers = data.draw(st.lists(st.integers(-len(payloads), len(payloads) - 1), max_size=20))
        assert [alone.read(number) for number in numbers] == [payloads[number] for number in numbers]
        batch = records.read_many(numbers)
        assert [bytes(each) for each in batch] == [payloads[number] for number in numbers]
        assert batch.data.nbytes == sum(len(payloads[number]) for number in numbers)


def test_strides_and_slices_share_an_epoch(tmp_path: Path) -> None:
    payloads = random_payloads(10_000)
    records = write(tmp_path / "a.rec", payloads)
    shares = [list(records.iterate(rank, step=3)) for rank in range(3)]
    assert [payload for rank in range(3) for payload in shares[rank]] == [
        payload for rank in range(3) for payload in payloads[rank::3]
    ]
    assert list(records.iterate(5, 9)) == payloads[5:9]


def test_numbers_outside_are_index_errors(tmp_path: Path) -> None:
    records = write(tmp_path / "a.rec", [b"a", b"b"])
    for number in (2, -3, 10**12):
        with pytest.raises(IndexError):
            records.read(number)
        with pytest.raises(IndexError):
            records.view(number)
        with pytest.raises(IndexError):
            records.read_many([0, number])
    assert records.read(-1) == b"b"
    assert len(records.read_many([])) == 0


def test_views_are_read_only_and_copy_nothing(tmp_path: Path) -> None:
    records = write(tmp_path / "a.rec", [b"first", b"second"])
    view = records.view(1)
    assert view.readonly
    assert view.obj is records.view(0).obj


def test_side_columns_and_keys_come_back(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number in range(5):
            writer.write(b"x" * number, key=10 * number, side={"label": number % 2, "score": number / 4})
    records = RecordFile(tmp_path / "a.rec")
    assert records.keys.tolist() == [0, 10, 20, 30, 40]
    assert records.read_key(30) == b"xxx"
    assert records.side["label"].tolist() == [0, 1, 0, 1, 0]
    assert records.side["score"].tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert records.lengths.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="key 7, which 0 records have"):
        records.read_key(7)


def test_side_arrays_of_any_length_come_back(tmp_path: Path) -> None:
    arrays = [np.arange(n, dtype=np.uint16) for n in (3, 0, 5)]
    with RecordWriter(tmp_path / "a.rec") as writer:
        for number, array in enumerate(arrays):
            writer.write(b"x", side={"tiles": array, "label": number})
    for path in (tmp_path / "a.rec", *rearrange([tmp_path / "a.rec"], tmp_path / "s", 1)):
        side = RecordFile(path).side
        assert [side["tiles"][i].tolist() for i in range(3)] == [array.tolist() for array in arrays]
        assert side["tiles"][2].dtype == np.uint16
        assert side["label"].tolist() == [0, 1, 2]
    assert verify(tmp_path / "a.rec").findings == []


def test_side_arrays_that_are_no_column_are_refused(tmp_path: Path) -> None:
    for second in (np.arange(2, dtype=np.int32), np.zeros((2, 2), np.uint16), 5):
        writer = RecordWriter(tmp_path / "a.rec")
        writer.write(b"a", side={"tiles": np.arange(2, dtype=np.uint16)})
        writer.write(b"b", side={"tiles": second})
        with pytest.raises(DataError, match="a side value is a number, or for every record a 1-d array"):
            writer.__exit__(None, None, None)
        assert list(tmp_path.iterdir()) == []


def test_ends_that_lead_outside_are_an_error_and_never_another_records_values(tmp_path: Path) -> None:
    ragged = RaggedColumn("tiles", np.arange(5, dtype=np.uint16), np.array([2, 9, 1], np.uint64))
    assert ragged[0].tolist() == [0, 1]
    for number, what in ((1, "values 2 to 9 of 5"), (2, "values 9 to 1 of 5")):
        with pytest.raises(DataError, match=f"'tiles': record {number} has {what}"):
            ragged[number]


def test_a_side_column_has_no_holes(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(b"a", side={"label": 1})
        with pytest.raises(DataError, match=r"side values \[\] for record 1, after \['label'\]"):
            writer.write(b"b")
    assert list(RecordFile(tmp_path / "a.rec")) == [b"a"]


def test_several_files_are_read_at_once_from_threads(tmp_path: Path) -> None:
    """MXNet's readers share a cursor between threads, and between data sets of one thread."""
    contents = [random_payloads(400, seed) for seed in range(3)]
    files = [write(tmp_path / f"{number}.rec", payloads) for number, payloads in enumerate(contents)]
    wrong: list[tuple[int, int]] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(1000):
            which, number = int(rng.integers(3)), int(rng.integers(400))
            if files[which].read(number) != contents[which][number]:
                wrong.append((which, number))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_process_reads_on(tmp_path: Path) -> None:
    payloads = random_payloads(200)
    records = write(tmp_path / "a.rec", payloads)
    assert records.read(7) == payloads[7]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # no exception may leave the child: it is a copy of the test process
        same = list(records) == payloads
        os.write(writer, b"1" if same else b"0")
        os._exit(0)
    assert list(records) == payloads
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)


def test_an_open_file_is_pickled_as_its_path(tmp_path: Path) -> None:
    records = write(tmp_path / "a.rec", [b"a", b"b"])
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(RecordFile.read, (records, 1)) == b"b"


def test_an_aborted_writer_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"old"])

    def stop_early() -> None:
        with RecordWriter(tmp_path / "a.rec", overwrite=True) as writer:
            writer.write(b"new")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stop_early()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.idx", "a.rec", "a.uidx"]
    assert list(RecordFile(tmp_path / "a.rec")) == [b"old"]


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"old"])
    with pytest.raises(DataError) as caught:
        RecordWriter(tmp_path / "a.rec")
    assert str(caught.value) == (
        f"{tmp_path}/a.rec, which exists\n"
        "  rule: a file is written once, under a new name ending in .rec, each record with the same side columns\n"
        "  so:   it was left as it is\n"
        "  try:  another name, or overwrite=True to replace the existing file"
    )
    assert list(write(tmp_path / "a.rec", [b"new"], overwrite=True)) == [b"new"]


def test_a_folder_that_cannot_be_written_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.rec", [b"a", b"b"])
    (tmp_path / "a.uidx").unlink()

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("unisono.data.recordio.index.write_index", refuse)
    records = RecordFile(tmp_path / "a.rec")
    assert list(records) == [b"a", b"b"]
    assert records.checksums == "computed later"
    assert f"{tmp_path}/a.uidx cannot be written (Permission denied): it is made again each time" in caplog.text


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/no.rec: No such file or directory"):
        RecordFile(tmp_path / "no.rec")
