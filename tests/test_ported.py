"""The programs of examples/ported: before and after give the same losses, on one process and on two."""

from __future__ import annotations

import math
import os
from pathlib import Path

import ported_table
import pytest
from nursery import Nursery
from ported import (
    FOLDER,
    LAUNCH,
    TORCHRUN,
    Numbers,
    Program,
    csv_logger,
    launch_after,
    run_after,
    run_before,
    trainer_state,
)

PROGRAMS = {
    "timm_train": Program(num_samples=272, batch=32, epochs=3, steps=24, beta=(0.8, 0.8)),
    "timm_finetune": Program(num_samples=240, batch=24, epochs=2, steps=20),
    "accelerate_loop": Program(num_samples=320, batch=32, epochs=2, steps=20),
    "accelerate_groups": Program(num_samples=160, batch=16, epochs=3, steps=30),
    "ddp_script": Program(num_samples=512, batch=64, epochs=4, steps=32, launcher=tuple(TORCHRUN)),
    "transformers_causal_lm": Program(num_samples=160, batch=16, epochs=2, steps=20, read=trainer_state),
    "transformers_classify": Program(num_samples=240, batch=16, epochs=2, steps=30, read=trainer_state),
    "lightning_module": Program(
        num_samples=256, batch=32, epochs=3, steps=24, read=csv_logger, environment="UNISONO_LIGHTNING_PYTHON"
    ),
}
# one in the quick tier
QUICK = "timm_train"
# Both compute in fp32 on the same samples; sums run in another order (batches of an evaluation, parts of a batch on two ranks),
# which changes the last of 7 digits, and each step passes it on to the next.
RTOL, ATOL = 1e-5, 1e-6

_known: dict[str, Numbers] = {}


@pytest.fixture
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Numbers:
    """The numbers of the original, which is run once."""
    name = request.getfixturevalue("name")
    program = PROGRAMS[name]
    if program.environment and program.environment not in os.environ:
        pytest.skip(f"{program.environment} is not set; see tests/peers/venvs.sh")
    if name not in _known:
        _known[name] = run_before(name, program, tmp_path_factory.mktemp(name), nursery)
    assert len(_known[name].losses) == program.steps
    return _known[name]


def names(*, quick: str = "") -> list[object]:
    return [
        pytest.param(
            name,
            marks=[] if name == quick else [pytest.mark.peer] if program.environment else [pytest.mark.full],
        )
        for name, program in PROGRAMS.items()
    ]


def require_equal(found: Numbers, expected: Numbers) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=RTOL, abs=ATOL)
    assert len(found.evaluations) == len(expected.evaluations) > 0
    for mine, theirs in zip(found.evaluations, expected.evaluations, strict=True):
        assert theirs
        assert {name: mine[name] for name in theirs} == pytest.approx(theirs, rel=RTOL, abs=ATOL)
    assert expected.losses[-1] < expected.losses[0]
    assert all(map(math.isfinite, found.losses))


@pytest.mark.parametrize("name", names(quick=QUICK))
def test_after_has_the_losses_of_before(name: str, expected: Numbers, tmp_path: Path, nursery: Nursery) -> None:
    require_equal(run_after(name, tmp_path, nursery), expected)


@pytest.mark.parametrize("launcher", [TORCHRUN, LAUNCH], ids=["torchrun", "launch"])
@pytest.mark.parametrize("name", names())
def test_two_processes_have_the_losses_of_before(
    name: str, launcher: list[str], expected: Numbers, tmp_path: Path
) -> None:
    require_equal(launch_after(name, launcher, tmp_path), expected)


def test_every_program_of_torch_is_run() -> None:
    folders = {path.name for path in FOLDER.iterdir() if (path / "before.py").exists()}
    assert {name for name in folders if not name.startswith(("mxnet_", "mindspore_"))} == PROGRAMS.keys()


def test_the_table_of_lines_is_counted() -> None:
    assert ported_table.PAGE.read_text() == ported_table.page()


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    source = '"""One."""\n\nimport a  # two\n\n# three\ndef f(x):\n    """Four.\n\n    Five.\n    """\n'
    source += "    return (\n        x\n    )\n"
    assert ported_table.code_lines(source) == ["import a", "def f(x):", "return (", "x", ")"]
