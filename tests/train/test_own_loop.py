"""The programs of docs/own-loop.md: numbers of plain torch loops, on one process and on two, and the same bits after a kill."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
from torch import Tensor

from unisono import Loader
from unisono.checkpoint import list_checkpoints, open_checkpoint

FOLDER = Path(__file__).parents[2] / "examples" / "own_loop"
NAMES = ["gan", "contrastive", "queue_rl"]
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
LAUNCH = [sys.executable, "-m", "unisono", "launch", "-n", "2", "--", sys.executable]
STEPS = 12
# one thread, as under a launcher: two that wait for each other take minutes where neighbours are busy
ON_CPU = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def example(name: str, device: str = "cpu") -> ModuleType:
    """The program as a module; on any device that is there for ``device=""``."""
    spec = importlib.util.spec_from_file_location(f"own_loop_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if device:
        vars(module)["find_device"] = lambda asked, local_rank: torch.device(device)
    return module


def plain_gan(steps: int) -> list[list[float]]:
    module, seen = example("gan"), []
    generator, discriminator = module.models()
    generate, discriminate = module.adam(generator), module.adam(discriminator)
    points = module.circle(512)
    order = Loader(module.from_map_style([{"x": p.numpy()} for p in points]), seed=0, global_batch=module.BATCH)
    for step in range(steps):
        real, fake = points[order.sample_ids(step)], generator(module.noise(step))
        discriminate.zero_grad()
        judged = module.discriminator_losses(discriminator, real, fake).mean()
        judged.backward()
        discriminate.step()
        generate.zero_grad()
        made = module.generator_losses(discriminator, fake).mean()
        made.backward()
        generate.step()
        seen.append([judged.item(), made.item()])
    return seen


def plain_contrastive(steps: int, skipped: Collection[int] = ()) -> list[list[float]]:
    """The samples of a step that is ``skipped`` (counted from 1) are passed over, and nothing else changes."""
    module, seen = example("contrastive"), []
    model = module.towers()
    adam, data = module.adam(model), module.pairs(256)
    order = Loader(data, seed=0, global_batch=module.BATCH)
    for step in range(steps):
        rows = data.read(order.sample_ids(step))
        loss = module.contrast(*(model[name](torch.as_tensor(rows[name])) for name in ("picture", "text")))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step + 1 not in skipped:
            adam.step()
        seen.append([loss.item()])
    return seen


def plain_queue_rl(steps: int) -> list[list[float]]:
    module, seen = example("queue_rl"), []
    model = module.models()
    adam, everyone = module.adam(model), range(module.EPISODES)
    behaviour = copy.deepcopy(model["policy"])
    for step in range(steps):
        with torch.no_grad():
            played = module.play(behaviour, step, everyone)
        behaviour.load_state_dict(model["policy"].state_dict())
        loss = module.losses(model, played).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        seen.append([loss.item(), played["reward"].sum().item() / module.EPISODES])
    return seen


PLAIN: dict[str, Callable[[int], list[list[float]]]] = {
    "gan": plain_gan,
    "contrastive": plain_contrastive,
    "queue_rl": plain_queue_rl,
}


def numbers(text: str) -> dict[int, list[float]]:
    """The numbers that each step printed, by step."""
    lines = re.finditer(r"^(?:\[[^\]]*\] ?)?step (\d+) ([-\d. ]+)$", text, re.M)
    return {int(line[1]): [float(number) for number in line[2].split()] for line in lines}


def require_equal(printed: dict[int, list[float]], name: str, rtol: float) -> None:
    assert list(printed) == list(range(1, STEPS + 1))
    expected = torch.tensor(PLAIN[name](STEPS))
    torch.testing.assert_close(torch.tensor(list(printed.values())), expected, rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_a_plain_torch_loop(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example(name).main(str(tmp_path), STEPS)
    require_equal(numbers(capsys.readouterr().out), name, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_numbers_on_an_accelerator(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The contrastive program computes in fp16 there, where the first steps only find the scale of the loss."""
    example(name, device="").main(str(tmp_path), STEPS)
    text = capsys.readouterr().out
    skipped = {int(step) for step in re.findall(r"^step (\d+) .* skipped$", text, re.M)}
    assert skipped <= ({1, 2, 3} if name == "contrastive" else set())
    printed = numbers(text.replace(" skipped", ""))
    assert list(printed) == list(range(1, STEPS + 1))
    expected = plain_contrastive(STEPS, skipped) if skipped else PLAIN[name](STEPS)
    torch.testing.assert_close(torch.tensor(list(printed.values())), torch.tensor(expected), rtol=0.05, atol=0.01)


def run(command: list[str], name: str, folder: Path, steps: int) -> str:
    arguments = [*command, str(FOLDER / f"{name}.py"), str(folder / name), str(steps)]
    done = subprocess.run(arguments, cwd=folder, env=ON_CPU, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("command", [PYTHON, TORCHRUN, LAUNCH], ids=["python", "torchrun", "launch"])
@pytest.mark.parametrize("name", NAMES)
def test_each_launcher_gives_the_same_numbers(name: str, command: list[str], tmp_path: Path) -> None:
    require_equal(numbers(run(command, name, tmp_path, STEPS)), name, rtol=1e-4)


def end_state(folder: Path) -> dict[str, Tensor]:
    newest = max(list_checkpoints(folder), key=lambda entry: entry.step)
    reader = open_checkpoint(newest.path)
    # the programs draw nothing from the global generators, nor seed them all
    return {name: reader.tensor(name) for name in reader.names() if not name.startswith("rng/")}


@pytest.mark.full
@pytest.mark.parametrize("command", [PYTHON, LAUNCH], ids=["python", "launch"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_killed_ends_with_the_same_bits(name: str, command: list[str], tmp_path: Path) -> None:
    steps, killed_after = 600, 95
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    expected = numbers(run(command, name, whole, steps))
    arguments = [*command, str(FOLDER / f"{name}.py"), str(cut / name), str(steps)]
    with subprocess.Popen(arguments, cwd=cut, env=ON_CPU, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if f"step {killed_after} " in line:
                break
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in everyone:
            each.kill()
    seen = numbers(run(command, name, cut, steps))
    assert 20 < min(seen) < steps
    assert seen == {step: expected[step] for step in seen}
    first, second = end_state(whole / name), end_state(cut / name)
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_two_ranks_goes_on_with_one(name: str, tmp_path: Path) -> None:
    run(LAUNCH, name, tmp_path, 8)
    seen = numbers(run(PYTHON, name, tmp_path, STEPS))
    assert list(seen) == [9, 10, 11, 12]
    torch.testing.assert_close(
        torch.tensor(list(seen.values())), torch.tensor(PLAIN[name](STEPS)[8:]), rtol=1e-4, atol=2e-6
    )


@pytest.mark.full
def test_the_launcher_restarts_a_loop_of_which_a_rank_was_killed(tmp_path: Path) -> None:
    steps, folder = 400, tmp_path / "cut"
    folder.mkdir()
    run(LAUNCH, "gan", tmp_path, steps)
    arguments = [*LAUNCH, str(FOLDER / "gan.py"), str(folder / "gan"), str(steps)]
    with subprocess.Popen(arguments, cwd=folder, env=ON_CPU, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step 95 " in line:
                break
        ranks = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if child.cmdline()[1:2] == [str(FOLDER / "gan.py")]
        ]
        assert len(ranks) == 2
        ranks[1].kill()
        process.stdout.read()
    assert process.returncode == 0
    first, second = end_state(tmp_path / "gan"), end_state(folder / "gan")
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_programs_as_they_are(name: str) -> None:
    page = (FOLDER.parents[1] / "docs" / "own-loop.md").read_text()
    assert f"examples/own_loop/{name}.py" in page


def test_an_actor_that_fails_ends_the_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("queue_rl")
    played = module.play

    def failing(policy: torch.nn.Module, step: int, episodes: range) -> dict[str, Tensor]:
        if step == 3:
            raise ValueError("the game crashed")
        return played(policy, step, episodes)

    monkeypatch.setattr(module, "play", failing)
    with pytest.raises(ValueError, match="the game crashed"):
        module.main(str(tmp_path), STEPS)
