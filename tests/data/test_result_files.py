"""Results of which files were lost or cut are refused by all that reads them."""

from __future__ import annotations

import json
import shutil
from fractions import Fraction
from pathlib import Path

import pytest

from unisono.data.cleaning_record import cleaning_file
from unisono.data.convert import Table, convert, open_table, write_table
from unisono.data.recordio.maintenance import repair
from unisono.data.result_files import require_whole_results
from unisono.errors import DataError
from unisono.quality.balance import balance
from unisono.quality.clean import clean
from unisono.quality.leak import find_leaks
from unisono.quality.options import DuplicateOptions, only_dedup
from unisono.quality.split import split

EXACT = only_dedup(DuplicateOptions(near=0.0))
HALVES = {"train": Fraction(1, 2), "test": Fraction(1, 2)}


@pytest.fixture
def cleaned(tmp_path: Path) -> Path:
    """Results of a clean command over ``in/a.jsonl`` and ``in/sub/b.jsonl``, with three documents of each."""
    for number, name in enumerate(("a.jsonl", "sub/b.jsonl")):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(path, Table(rows=[{"text": f"text {number} {row % 3}", "label": "x"} for row in range(5)]))
    clean([tmp_path / "in"], tmp_path / "k7", EXACT)
    return tmp_path / "k7"


def cut(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def test_sizes_of_the_files(cleaned: Path) -> None:
    sizes = json.loads((cleaned / "data_sizes.json").read_bytes())
    assert sizes == {name: (cleaned / "data" / name).stat().st_size for name in ("a.jsonl", "sub/b.jsonl")}
    require_whole_results([cleaned, cleaned / "data", cleaned / "data" / "*.jsonl"])


@pytest.mark.parametrize("given", ["k7", "k7/data", "k7/data/sub"])
def test_a_lost_file(cleaned: Path, given: str) -> None:
    (cleaned / "data" / "sub" / "b.jsonl").unlink()
    (cleaned / "data" / "sub" / "other.jsonl").write_text('{"text": "another"}\n')
    with pytest.raises(DataError) as caught:
        split([cleaned.parent / given], cleaned.parent / "parts", HALVES, options=EXACT.dedup)
    assert caught.value.problems[0].given == (
        f"{cleaned}/data, where files are not as they were written: 'sub/b.jsonl' is missing"
    )
    assert not (cleaned.parent / "parts").exists()


def test_a_cut_file(cleaned: Path, tmp_path: Path) -> None:
    file = cleaned / "data" / "a.jsonl"
    size = file.stat().st_size
    cut(file)
    message = rf"'a\.jsonl' has {file.stat().st_size} bytes, not {size}"
    for path in (cleaned, file):
        with pytest.raises(DataError, match=message):
            find_leaks(path, [tmp_path / "in"], options=EXACT.dedup)
        with pytest.raises(DataError, match=message):
            balance([path], field="label")
    with pytest.raises(DataError, match=message):
        convert(file, tmp_path / "copy.csv")
    assert not (tmp_path / "copy.csv").exists()
    with pytest.raises(DataError, match=message):
        cleaning_file([tmp_path / "k*" / "data" / "*.jsonl"])
    require_whole_results([cleaned / "data" / "sub"])  # of which no file is cut
    copied = tmp_path / "left"
    shutil.copytree(cleaned / "data", copied)
    assert find_leaks(copied, [tmp_path / "in"], options=EXACT.dedup).splits[0].documents == 5


def test_a_finished_job_without_its_files(cleaned: Path, tmp_path: Path) -> None:
    assert clean([tmp_path / "in"], cleaned, EXACT).kept == 6
    cut(cleaned / "data" / "a.jsonl")
    with pytest.raises(DataError, match=r"'a\.jsonl' has .* bytes, not"):
        clean([tmp_path / "in"], cleaned, EXACT)
    shutil.rmtree(cleaned / "data")
    with pytest.raises(DataError, match=r"'a\.jsonl' is missing and 1 more"):
        clean([tmp_path / "in"], cleaned, EXACT)
    (cleaned / "data_sizes.json").write_text("{")
    with pytest.raises(DataError, match=r"data_sizes\.json, which is no list of files"):
        clean([tmp_path / "in"], cleaned, EXACT)


def test_a_part_of_a_split(cleaned: Path, tmp_path: Path) -> None:
    """Each part has the sizes of its own files, so it may be moved away."""
    out = tmp_path / "parts"
    split([cleaned], out, HALVES, options=EXACT.dedup)
    shutil.copytree(out / "train", tmp_path / "moved")
    cut(next((out / "train" / "data").rglob("*.jsonl")))
    with pytest.raises(DataError, match="not as they were written"):
        split([cleaned], out, HALVES, options=EXACT.dedup)
    with pytest.raises(DataError, match="not as they were written"):
        find_leaks(out / "train", [out / "test"], options=EXACT.dedup)
    assert find_leaks(tmp_path / "moved", [out / "test"], options=EXACT.dedup).splits[0].documents == 3


def test_data_in_folders_named_like_those_of_results(tmp_path: Path) -> None:
    """Nothing is written among them."""
    for name in ("in/data/data/a.jsonl", "in/data/kept/b.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        write_table(tmp_path / name, Table(rows=[{"text": name}]))
    clean([tmp_path / "in"], tmp_path / "out", EXACT)
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("data_sizes.json"))
    assert found == ["data_sizes.json"]


def test_a_cut_file_of_records_is_repaired(tmp_path: Path) -> None:
    write_table(tmp_path / "a.rec", Table(rows=[{"data": f"text {row}".encode()} for row in range(5)]))
    clean([tmp_path / "a.rec"], tmp_path / "k7", EXACT)
    damaged = tmp_path / "k7" / "data" / "a.rec"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    repair(damaged, tmp_path / "b.rec")
    assert len(list(open_table(tmp_path / "b.rec").rows)) == 4
