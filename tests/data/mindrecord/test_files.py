"""What goes in comes out, by any way of reading, from threads and forks; whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.mindrecord import FieldType, MindRecordFile, MindRecordWriter
from unisono.errors import DataError

Write = Callable[..., MindRecordFile]
Same = Callable[[Any, Any], bool]
SMALL = {"page_bytes": 32 << 10, "header_bytes": 16 << 10}
SCHEMA = {"label": "int64", "image": "bytes"}


def labelled(count: int, seed: int = 0, longest: int = 300) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"image": rng.bytes(int(rng.integers(1, longest))), "label": number} for number in range(count)]


SHAPES = st.sampled_from([[-1], [3], [2, -1], [-1, 2, 2]])
KINDS = st.one_of(
    st.sampled_from(["int32", "int64", "float32", "float64", "string", "bytes"]).map(lambda kind: {"type": kind}),
    st.builds(
        lambda kind, shape: {"type": kind, "shape": shape},
        st.sampled_from(["int32", "int64", "float32", "float64"]),
        SHAPES,
    ),
)


def value_of(data: Any, kind: dict[str, Any]) -> Any:
    name = kind["type"]
    if "shape" in kind:
        shape = [data.draw(st.integers(1, 5)) if dim == -1 else dim for dim in kind["shape"]]
        rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
        if name.startswith("float"):
            return rng.standard_normal(shape).astype(name)
        bits = rng.integers(1, np.iinfo(name).bits, shape)  # as many short as long ones
        return (rng.integers(np.iinfo(name).min, np.iinfo(name).max, shape, np.int64) >> (bits - 1)).astype(name)
    return data.draw(
        {
            "int32": st.integers(-(2**31), 2**31 - 1),
            "int64": st.integers(-(2**63), 2**63 - 1),
            "float32": st.floats(width=32, allow_nan=False, allow_infinity=False),
            "float64": st.floats(allow_nan=False, allow_infinity=False),
            "string": st.text(max_size=8).filter(lambda text: "\0" not in text),
            "bytes": st.binary(min_size=1, max_size=9),
        }[name]
    )


@settings(max_examples=40, deadline=None)
@given(
    schema=st.dictionaries(st.sampled_from(["a", "B", "c_1", "d", "id", "_7"]), KINDS, min_size=1),
    count=st.integers(0, 7),
    shards=st.integers(1, 3),
    data=st.data(),
)
def test_what_goes_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory,
    write: Write,
    same: Same,
    schema: dict[str, Any],
    count: int,
    shards: int,
    data: Any,
) -> None:
    rows = [{name: value_of(data, kind) for name, kind in sorted(schema.items())} for _ in range(count)]
    path = tmp_path_factory.mktemp("any") / "a"
    records = write(path, schema, rows, shards=shards)
    ordered = [row for shard in range(shards) for row in rows[shard::shards]]
    assert same(list(records), ordered)
    # without an index the pages alone give the same
    for each in records.paths:
        each.with_name(f"{each.name}.db").unlink()
    assert same(list(MindRecordFile(path if shards == 1 else records.paths[-1])), ordered)


def test_many_pages_of_both_kinds_and_several_shards(tmp_path: Path, write: Write, same: Same) -> None:
    rng = np.random.default_rng(1)
    schema = {"text": "string", "image": "bytes", "n": "int32"}
    rows = [
        {"image": rng.bytes(int(rng.integers(1, 4000))), "n": n, "text": "t" * int(rng.integers(0, 3000))}
        for n in range(200)
    ]
    records = write(tmp_path / "a", schema, rows, shards=3)
    pages = [page.page_type for shard in records._shards for page in shard.head.page]
    assert pages.count("RAW_DATA") > 6
    assert pages.count("BLOB_DATA") > 9
    assert same(list(records), [row for shard in range(3) for row in rows[shard::3]])
    assert [path.name for path in records.paths] == ["a0", "a1", "a2"]


def test_the_same_rows_make_the_same_files(tmp_path: Path, write: Write) -> None:
    """Fault 1: MindSpore deals the rows that are left over to shards by chance."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        write(folder / "a", SCHEMA, labelled(100), shards=3)
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert sorted(first) == ["a0", "a0.db", "a1", "a1.db", "a2", "a2.db"]
    assert first == second


def test_a_row_that_fills_a_page_fits_and_one_byte_more_does_not(tmp_path: Path, same: Same) -> None:
    room = (32 << 10) - 8
    rows = [{"image": bytes([n]) * size, "label": n} for n, size in enumerate([room, 1, room, room - 9, 1, 1])]
    with MindRecordWriter(tmp_path / "a", SCHEMA, **SMALL) as writer:
        writer.write(rows[0])
        with pytest.raises(DataError) as caught:
            writer.write({"image": bytes(room + 1), "label": 1})
        for row in rows[1:]:
            writer.write(row)
    assert str(caught.value) == (
        "row 1: blobs of 32761 bytes\n"
        "  rule: the scalars, or the blobs, of a row are in one page: of 32768 bytes, 8 for the length\n"
        "  so:   the row was not written; the rows before it are kept\n"
        "  try:  page_bytes=32772 or more, up to 268435456"
    )
    assert same(list(MindRecordFile(tmp_path / "a")), rows)


def test_fields_may_be_given_as_they_are_read(tmp_path: Path, write: Write, same: Same) -> None:
    records = write(tmp_path / "a", {"v": {"type": "int32", "shape": [2]}, "w": "float64"}, [])
    assert records.schema == {"v": FieldType(type="int32", shape=(2,)), "w": FieldType(type="float64")}
    row = {"v": np.array([1, -70000], np.int32), "w": 0.25}
    assert same(write(tmp_path / "b", records.schema, [row]).read(0), row)


def test_numpy_scalars_are_taken(tmp_path: Path, write: Write, same: Same) -> None:
    schema = {"a": "int32", "b": "int64", "c": "float32", "d": "float64"}
    row = {"a": np.int64(-5), "b": np.uint8(200), "c": np.float32(0.1), "d": np.float64(0.1)}
    wanted = {"a": -5, "b": 200, "c": float(np.float32(0.1)), "d": 0.1}
    assert same(write(tmp_path / "a", schema, [row]).read(0), wanted)


def test_floats_keep_every_bit(tmp_path: Path, write: Write, same: Same) -> None:
    """Fault 5: FileReader returns 2.0 as int, -0.0 and 1e-320 as 0."""
    rows = [{"x": x} for x in (2.0, -0.0, 1e-320, 0.1, float("inf"), -float("inf"), float("nan"), 1.7e308)]
    assert same(
        list(
            write(tmp_path / "a", {"x": "float64", "y": "int32"}, [{**row, "y": 0} for row in rows], index_fields=["y"])
        ),
        [{**row, "y": 0} for row in rows],
    )


def test_rows_outside_are_index_errors(tmp_path: Path, write: Write) -> None:
    records = write(tmp_path / "a", SCHEMA, labelled(3))
    for number in (3, -4, 10**12):
        with pytest.raises(IndexError):
            records.read(number)
        with pytest.raises(IndexError):
            records.read_many([0, number])
    assert records[-1]["label"] == 2
    assert records.read_many(np.array([2, 0]))[0]["label"] == 2
    assert records.read_many([]) == []
    with pytest.raises(ValueError, match=r"one dim, not shape \[1, 1\]"):
        records.read_many([[0]])


def test_files_are_read_from_threads_and_by_a_forked_process(tmp_path: Path, write: Write, same: Same) -> None:
    contents = [labelled(200, seed) for seed in range(2)]
    files = [write(tmp_path / f"f{number}", SCHEMA, rows) for number, rows in enumerate(contents)]
    wrong: list[tuple[int, int]] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            which, number = int(rng.integers(2)), int(rng.integers(200))
            if files[which].read(number) != contents[which][number]:
                wrong.append((which, number))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # no exception may leave the child: it is a copy of the test process
        os.write(writer, b"1" if same(list(files[0]), contents[0]) else b"0")
        os._exit(0)
    assert same(list(files[0]), contents[0])
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)


def test_an_open_file_is_pickled_as_its_path(tmp_path: Path, write: Write) -> None:
    make, arguments = write(tmp_path / "a", SCHEMA, labelled(3)).__reduce__()
    assert arguments == (tmp_path / "a", None, True)
    assert make(*arguments).read(2)["label"] == 2


def test_an_aborted_writer_leaves_what_was_there(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a", SCHEMA, labelled(3))

    def stop_early() -> None:
        with MindRecordWriter(tmp_path / "a", SCHEMA, overwrite=True, **SMALL) as writer:
            writer.write(labelled(1)[0])
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stop_early()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.db"]
    assert len(MindRecordFile(tmp_path / "a")) == 3


def test_a_writer_that_is_done_takes_no_rows(tmp_path: Path) -> None:
    with MindRecordWriter(tmp_path / "a", SCHEMA, **SMALL) as writer:
        writer.write(labelled(1)[0])
    with pytest.raises(ValueError, match="this writer has put its files in place, or thrown them away"):
        writer.write(labelled(1)[0])


def test_nothing_is_overwritten_unasked(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a", SCHEMA, labelled(3), shards=2)
    with pytest.raises(DataError) as caught:
        MindRecordWriter(tmp_path / "a", SCHEMA, shards=2)
    assert str(caught.value) == (
        f"{tmp_path}/a0, which exists\n"
        "  rule: files are written once, under a new name\n"
        "  so:   it was left as it is\n"
        "  try:  another name, or overwrite=True to replace the existing file"
    )
    assert len(write(tmp_path / "a", SCHEMA, labelled(7), shards=2, overwrite=True)) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a0", "a0.db", "a1", "a1.db"]


def test_a_stop_between_the_renames_is_seen_or_harmless(
    tmp_path: Path, write: Write, same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every rename: the old rows, the new ones, or an error; never some of each."""
    old, new = labelled(9, 1), labelled(11, 2)
    replace = Path.replace
    seen = set()
    for last in range(6):
        write(tmp_path / "a", SCHEMA, old, shards=3, overwrite=True)
        calls = 0

        def stop(self: Path, target: Path, last: int = last) -> Path:
            nonlocal calls
            if calls == last:
                raise KeyboardInterrupt
            calls += 1
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", stop)
            with pytest.raises(KeyboardInterrupt):
                write(tmp_path / "a", SCHEMA, new, shards=3, overwrite=True)
        left = [path for path in tmp_path.iterdir() if path.suffix != ".db"]
        assert len(left) == 3  # all new rows are there, if not all under their names
        try:
            found = list(MindRecordFile(tmp_path / "a0"))
        except DataError:
            seen.add("error")
        else:
            assert same(found, [row for shard in range(3) for row in new[shard::3]])
            seen.add("new")
        for path in tmp_path.iterdir():
            path.unlink()
    assert seen == {"error", "new"}


def test_a_missing_file_is_named(tmp_path: Path, write: Write) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}/no: No such file or directory"):
        MindRecordFile(tmp_path / "no")
    records = write(tmp_path / "a", SCHEMA, labelled(9), shards=3)
    records.paths[1].unlink()
    with pytest.raises(DataError, match=f"{tmp_path}/a1: No such file or directory"):
        MindRecordFile(tmp_path / "a2")
    assert len(MindRecordFile([tmp_path / "a2", tmp_path / "a0"])) == 6
    with pytest.raises(DataError, match="no files"):
        MindRecordFile([])
