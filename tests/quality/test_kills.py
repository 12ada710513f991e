"""Data sets are cleaned, split, compared and relabelled by commands that are killed, or that cannot write, at any moment.

After a kill the same command goes on to the same results, byte for byte; at no moment does OUT hold a part of them that looks
whole; inputs do not change.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
from kills import Ended, Killer
from pictures import edits, jpeg, photograph, write_photographs

from unisono.data.convert.pack import pack_images
from unisono.data.per_file_arrays import write_array
from unisono.quality.columns.series import new_array
from unisono.quality.labels.label_errors import find_label_errors

WORK = Path("out", "work")  # intermediate files of a job
pytest.importorskip("rensa")

TEMPORARY = re.compile(r"\.tmp-\d+-[0-9a-f]+")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def texts(folder: Path) -> None:
    """Twelve documents, of which two come again, two in another wording; labels contradict each other."""
    rng = np.random.default_rng(5)
    found = planted.documents(12, rng, words=(60, 90))
    found += [planted.edited(found[1], 1, rng), found[2], planted.edited(found[3], 1, rng), found[4]]
    rows = [{"text": f"me@example.org  {text}", "label": "ab"[number % 2]} for number, text in enumerate(found)]
    write_rows(folder / "a.jsonl", rows[:10])
    write_rows(folder / "b.jsonl", rows[10:])


def marks(folder: Path) -> None:
    """The marks that the page of labels would save."""
    texts(folder)
    find_label_errors([folder / "a.jsonl", folder / "b.jsonl"], folder / "labels", "label")
    found = re.search(
        r'<script type="application/json" id="marked-data">(.*?)</script>',
        (folder / "labels" / "report.html").read_text(),
        flags=re.DOTALL,
    )
    assert found is not None
    shutil.rmtree(folder / "labels")
    made = [
        {"file": "a.jsonl", "row": 2, "label": "a", "action": "change", "to": "b"},
        {"file": "b.jsonl", "row": 1, "label": "b", "action": "drop"},
    ]
    (folder / "marks.json").write_text(json.dumps({**json.loads(found[1])["about"], "marks": made}))


def tables(folder: Path) -> None:
    """Two files with values out of line."""
    rng = np.random.default_rng(6)
    for name in "ab":
        values = rng.normal(20, 1, 80).tolist()
        values[7] = 1e6
        write_rows(folder / f"{name}.jsonl", [{"x": value, "y": number} for number, value in enumerate(values)])


def images(folder: Path) -> None:
    """Pictures of two classes, copies of some, and a file that is none."""
    write_photographs(folder / "photos" / "cat", range(3))
    write_photographs(folder / "photos" / "dog", range(10, 13))
    (folder / "photos" / "dog" / "exact.jpg").write_bytes(jpeg(photograph(1)))
    (folder / "photos" / "dog" / "near.jpg").write_bytes(edits(photograph(2))["half.jpg"])
    (folder / "photos" / "dog" / "none.jpg").write_bytes(b"no image at all")


def records(folder: Path) -> None:
    images(folder)
    (folder / "photos" / "dog" / "none.jpg").unlink()
    pack_images(folder / "photos", folder / "all.rec")
    shutil.rmtree(folder / "photos")


@dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        make: Writes its inputs into a folder.
        command: Its arguments, without OUT.
        watched: A function of the comparison.
    """

    make: Callable[[Path], None]
    command: str
    watched: str


CASES = {
    "clean": Case(texts, 'clean a.jsonl b.jsonl --set mask.kinds=["email"] --set filter.min_words=5', "jaccard"),
    "dedup": Case(texts, "dedup a.jsonl b.jsonl", "jaccard"),
    "split": Case(texts, "split a.jsonl b.jsonl --part x=1/2 --part y=1/2 --stratify label", "jaccard"),
    "leak": Case(texts, "leak a.jsonl b.jsonl", "jaccard"),
    "labels": Case(texts, "labels a.jsonl b.jsonl --label label", "jaccard"),
    "relabel": Case(marks, "relabel a.jsonl b.jsonl --marks marks.json", "read_labels"),
    "balance": Case(texts, "balance a.jsonl b.jsonl --label label", "_balance"),
    "columns": Case(tables, "columns a.jsonl b.jsonl --mask all", "judge_column"),
    "clean images": Case(images, "clean photos", "gradient_correlation"),
    "dedup images": Case(images, "dedup photos --on-error skip", "gradient_correlation"),
    "clean records": Case(records, "clean all.rec", "gradient_correlation"),
    "dedup records": Case(records, "dedup all.rec", "gradient_correlation"),
}


def tree(folder: Path) -> dict[str, bytes]:
    """All files and folders, those of the lock aside."""
    found = sorted(path for path in folder.rglob("*") if path.name != ".lock")
    return {path.relative_to(folder).as_posix(): b"" if path.is_dir() else path.read_bytes() for path in found}


class Job:
    """A command in a folder of its own, and the results of one that nobody disturbs."""

    def __init__(self, killer: Killer, folder: Path, case: Case, name: str = "job") -> None:
        self.folder, self.out = folder / "job", folder / "job" / "out"
        self._killer, self._arguments = killer, ["data", *case.command.split(), "--json", "--out", "out"]
        self.folder.mkdir()
        case.make(self.folder)
        self._inputs = self._stamped()
        self.ended = self.run(watched=case.watched)
        assert self.ended.code in (0, 1), self.ended.err  # of a leak, or a difference
        self.whole = tree(self.out)
        assert "report.json" in self.whole
        assert not any(name.startswith("work") for name in self.whole)
        shutil.rmtree(self.out)

    def run(self, **order: Any) -> Ended:
        return self._killer.run(self.folder, self._arguments, **order)

    def kill(self, **moment: int) -> None:
        """A run that is killed at a moment."""
        ended = self.run(**moment)
        assert ended.code == -signal.SIGKILL, (moment, ended)
        self.require_no_part()

    def require_no_part(self) -> None:
        """What has the name of a result is that result, the report comes last, and the inputs are as they were."""
        found = tree(self.out) if self.out.exists() else {}
        found = {name: content for name, content in found.items() if name.split("/")[0] != "work"}
        results = {name: content for name, content in found.items() if not TEMPORARY.search(name)}
        names = {name.split("/")[0] for name in (self.whole if "report.json" in results else results)}
        assert results == {name: content for name, content in self.whole.items() if name.split("/")[0] in names}
        assert self._stamped() == self._inputs

    def require_goes_on(self) -> Ended:
        """The same command comes to the same results, and leaves nothing else behind."""
        ended = self.run()
        assert (ended.code, ended.out) == (self.ended.code, self.ended.out), ended.err
        found = tree(self.out)
        assert sorted(found) == sorted(self.whole)
        assert found == self.whole
        assert self._stamped() == self._inputs
        shutil.rmtree(self.out)
        return ended

    def require_refused(self, reason: str, **order: Any) -> None:
        """A run that cannot write says so in four parts, and what there was before stays as good."""
        ended = self.run(**order)
        assert ended.code == 2, ended
        (problem,) = json.loads(ended.out)["problems"]
        assert problem == {
            "given": f"out, which cannot be written: {reason}",
            "rule": "results are written into a folder, which needs room for them and for intermediate files",
            "consequence": "the job is not finished",
            "nearest": "room there, and the right to write there; then run the same command again",
        }
        self.require_no_part()

    def before(self, what: str) -> int:
        """The number of the first change in OUT that is described so."""
        return next(number for number, change in enumerate(self.ended.changes) if re.search(what, change))

    def _stamped(self) -> dict[str, Any]:
        paths = [path for path in self.folder.rglob("*") if self.out not in (path, *path.parents)]
        return {str(path): (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in paths}


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    """Shared by all tests here: it takes a while to import the commands."""
    with Killer() as made:
        yield made


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_a_kill_at_each_stage(killer: Killer, tmp_path: Path, case: Case) -> None:
    job = Job(killer, tmp_path, case)
    changes, watched = job.ended.changes, job.ended.watched
    written = [number for number, change in enumerate(changes) if change.startswith(f"open {WORK}/new/")]
    for moment in (
        {"at_call": watched[len(watched) // 2]},  # in the comparison
        {"at_change": written[len(written) // 2] + 1},  # while kept rows are written
        {"at_change": job.before(rf"^os\.rename {WORK}/new/[^/ ]+ out/[^/ ]+$") + 1},  # between two results
        {"at_change": job.before(r"^open out/report\.json\.tmp")},  # all results are there, and no report
        {"at_change": job.before(r"^os\.rename out/report\.json\.tmp")},  # a report under another name
        {"at_change": len(changes) - 1},  # the report is there, and the last of the intermediate files
        {"at_call": random.Random(case.command).randrange(job.ended.calls) + 1},
    ):
        job.kill(**moment)
        job.require_goes_on()


def kill_twice(job: Job) -> None:
    """Kill a job whose results are there, but no report, and then the one that goes on, while it exchanges them for its own."""
    results = job.before(r"^open out/report\.json\.tmp")
    job.kill(at_change=results)
    changes = job.require_goes_on().changes
    last = max(number for number, change in enumerate(changes) if change.startswith(f"open {WORK}/new/"))
    report = next(number for number, change in enumerate(changes) if "out/report.json.tmp" in change)
    for number in range(last + 1, report + 1):
        job.kill(at_change=results)
        job.kill(at_change=number)
        job.require_goes_on()


def test_a_second_kill(killer: Killer, tmp_path: Path) -> None:
    kill_twice(Job(killer, tmp_path, CASES["clean"]))


@pytest.mark.full
def test_a_kill_before_each_change_and_at_random(killer: Killer, tmp_path: Path, case: Case) -> None:
    job, draw = Job(killer, tmp_path, case), random.Random(case.command)
    kill_twice(job)
    for number in range(len(job.ended.changes)):
        job.kill(at_change=number)
        job.require_goes_on()
    for _ in range(20):
        job.kill(at_call=draw.randrange(job.ended.calls) + 1)
        job.require_goes_on()


@pytest.mark.full
def test_processes_end_with_the_command_that_is_killed(killer: Killer, tmp_path: Path) -> None:
    """``run`` returns when nobody has the standard error that they share."""
    job = Job(killer, tmp_path, Case(texts, "dedup a.jsonl b.jsonl --workers 2", "jaccard"))
    for what in (rf"^open {WORK}/sketches/chunk-", rf"^open {WORK}/sketches/chunks\.jsonl", rf"^open {WORK}/new/"):
        job.kill(at_change=job.before(what))
        job.require_goes_on()


def test_a_limit_of_the_size_of_files(killer: Killer, tmp_path: Path, case: Case) -> None:
    job = Job(killer, tmp_path, case)
    largest = max(map(len, job.whole.values()))
    for limit in (0, 200, largest // 2, largest - 1):
        job.require_refused("EFBIG, File too large", max_file_bytes=limit)
        job.require_goes_on()


def test_results_that_are_lost(killer: Killer, tmp_path: Path, case: Case) -> None:
    """The same command says which, and leaves the rest as it is."""
    job = Job(killer, tmp_path, case)
    assert job.run().code == job.ended.code
    for name in sorted(
        {name.split("/")[0] for name in job.whole} - {"job.json", "report.json", "data", "data_sizes.json"}
    ):
        (job.out / name).rename(tmp_path / "lost")
        before, ended = tree(job.out), job.run()
        (problem,) = json.loads(ended.out)["problems"]
        assert (ended.code, problem["given"]) == (2, f"out, where results of the job are missing: {name}"), ended
        assert tree(job.out) == before
        (tmp_path / "lost").rename(job.out / name)
    assert job.run().code == job.ended.code


def many_labels(folder: Path) -> None:
    write_rows(folder / "a.jsonl", [{"label": "ab"[number % 2]} for number in range(3000)])


def test_arrays_of_several_pages_without_room(killer: Killer, tmp_path: Path) -> None:
    """A reason also where ``numpy.save`` has none."""
    job = Job(killer, tmp_path, Case(many_labels, "balance a.jsonl --label label", "_balance"))
    for limit in (8192, 20000):
        job.require_refused("EFBIG, File too large", max_file_bytes=limit)
        job.require_goes_on()


@pytest.mark.parametrize("array", [np.arange(3000), np.zeros(0, np.uint64), np.arange(20.0)[::3]])
def test_an_array_is_written_as_numpy_writes_it(tmp_path: Path, array: Any) -> None:
    np.save(tmp_path / "theirs.npy", array)
    write_array(tmp_path / "ours.npy", array)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets us mount nothing: no disk was full")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def test_a_full_disk(killer: Killer, small_disk: Path, case: Case) -> None:
    job, filler = Job(killer, small_disk, case), small_disk / "filler"
    free = free_bytes(small_disk)
    job.kill(at_change=job.before(r"^open out/report\.json\.tmp"))
    needed = free - free_bytes(small_disk)
    job.require_goes_on()
    for share in (0.0, 0.3, 0.6, 0.9):
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - int(share * needed))
        job.require_refused("ENOSPC, No space left on device")
        filler.unlink()
        job.require_goes_on()


def test_a_file_in_memory_without_room(small_disk: Path) -> None:
    """It is refused; a write to it would end the process by SIGBUS."""
    with pytest.raises(OSError, match="No space left on device"):
        new_array(small_disk / "numbers", 2 << 20, np.float64)


def test_no_right_to_write(killer: Killer, tmp_path: Path, case: Case) -> None:
    job = Job(killer, tmp_path, case)
    job.folder.chmod(0o555)
    job.require_refused("EACCES, Permission denied", without_rights=True)
    job.folder.chmod(0o755)
    assert not job.out.exists()
    job.kill(at_change=job.before(r"^open out/report\.json\.tmp"))
    job.out.chmod(0o555)  # which another one has done meanwhile
    job.require_refused("EACCES, Permission denied", without_rights=True)
    job.out.chmod(0o755)
    job.require_goes_on()
