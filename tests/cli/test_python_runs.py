"""``unisono eval`` and ``checkpoint export`` on the folder of a Python script's run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from commands import Desk, Outcome
from safetensors.torch import load_file, load_model

SCRIPT = """
import torch
from torch import nn

from unisono import ObserveOptions, PlanOptions, Trainer, TrainOptions
from unisono.train import METRICS, Metric


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)


class Plain(Tied):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(2, 2)


class Embedding(nn.Embedding):
    def __init__(self):
        super().__init__(11, 8)


def loss(outputs, batch):
    losses = nn.functional.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return losses.sum(), torch.tensor(float(len(losses)))


def largest_logit(outputs, batch, loss_sum, weight):
    return outputs.double().amax().reshape(1)


texts = torch.arange(96).reshape(16, 6) % 11
train = [{"tokens": text[:-1], "targets": text[1:]} for text in texts]
held_out = train[:4]
OWN = {"top": Metric(size=1, sums=largest_logit, value=lambda total: total[0])}


def samples():
    return held_out


ragged = [{"tokens": text[: 2 + n], "targets": text[1 : 3 + n]} for n, text in enumerate(texts[:3])]


def pad(given):
    width = max(len(sample["tokens"]) for sample in given)
    rows = [[torch.nn.functional.pad(s[name], (0, width - len(s[name]))) for s in given] for name in ("tokens", "targets")]
    return {"tokens": torch.stack(rows[0]), "targets": torch.stack(rows[1])}


def make():
    return Tied()


if __name__ == "__main__":
    run = Trainer(
        Tied(),
        train,
        PlanOptions(device="cpu", precision="fp32", global_batch=4),
        objective=loss,
        options=TrainOptions(steps=3, eval_every_steps=0),
        eval_data=held_out,
        metrics={"accuracy": METRICS["accuracy"]},
        observe=ObserveOptions(trackers=("csv",), report=False),
    )
    with run:
        print(dict(run.fit().evaluation))
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script's run, with the script and its last evaluation beside it."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "tied.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "tied.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (folder / "evaluation.json").write_text(next(x for x in done.stdout.splitlines() if x[0] == "{").replace("'", '"'))
    return folder / "runs/tied"


@pytest.fixture
def script(run_dir: Path) -> str:
    return str(run_dir.parent.parent / "tied.py")


def test_the_folder_says_what_the_run_is(run_dir: Path) -> None:
    written = tomllib.loads((run_dir / "config.toml").read_text())
    assert written["components"] == {
        "model": "python:Tied",
        "objective": "python:loss",
        "data": "python:list",
        "metrics": ["accuracy"],
    }
    assert (written["train"]["steps"], written["plan"]["global_batch"], written["data"]["seq_len"]) == (3, 4, 5)
    assert "adamw" in (run_dir / "config.toml").read_text().splitlines()[1]
    assert json.loads((run_dir / "plan.json").read_text())["batch"]["global_batch"] == 4


def evaluate(desk: Desk, run_dir: Path, script: str, **options: str) -> Outcome:
    given = {"model": "Tied", "data": "held_out", "objective": "loss"} | options
    return desk.here("eval", str(run_dir), "--json", *(f"--{name}={script}:{text}" for name, text in given.items()))


def test_eval_is_the_scripts_own_evaluation(desk: Desk, run_dir: Path, script: str) -> None:
    done = evaluate(desk, run_dir, script)
    assert done.code == 0, done.out
    expected = json.loads((run_dir.parent.parent / "evaluation.json").read_text())
    assert done.json["evaluation"] == expected
    assert (done.json["step"], done.json["samples"]) == (3, 4)
    own = evaluate(desk, run_dir, script, model="make", data="samples", metrics="OWN")
    assert own.json["evaluation"].keys() == {"loss", "top"}
    assert own.json["evaluation"]["loss"] == expected["loss"]
    named = desk.here(
        "eval", str(run_dir), "--json", f"--model={script}:Tied", f"--data={script}:held_out", "--objective=next_token"
    )
    assert named.json["evaluation"]["loss"] == pytest.approx(expected["loss"])


def test_a_collate_fn_makes_batches_of_the_samples(desk: Desk, run_dir: Path, script: str) -> None:
    done = evaluate(desk, run_dir, script, data="ragged", **{"collate-fn": "pad"})
    assert done.code == 0, done.out
    assert done.json["samples"] == 3
    alone = evaluate(desk, run_dir, script, data="ragged")
    assert "cannot be stacked" in str(alone.json["problems"])
    # padded, the three are rows of a table that needs no collate_fn
    table = Path(script).with_name("table.py")
    table.write_text(
        "from tied import pad, ragged\nbatch = pad(ragged)\nrows = [dict(zip(batch, row)) for row in zip(*batch.values())]\n"
    )
    padded = desk.here(
        "eval", str(run_dir), "--json", f"--model={script}:Tied", f"--data={table}:rows", f"--objective={script}:loss"
    )
    assert padded.json["evaluation"] == done.json["evaluation"]


def test_export(desk: Desk, run_dir: Path, script: str, tmp_path: Path) -> None:
    done = desk.here("checkpoint", "export", str(run_dir), str(tmp_path / "out"), f"--model={script}:Tied")
    assert done.code == 0, done.err
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"embed.weight"}
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(11, 8)
    model.head = torch.nn.Linear(8, 11, bias=False)
    model.head.weight = model.embed.weight
    assert load_model(model, tmp_path / "out/model.safetensors") == (set(), [])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            [],
            (
                "without --data",
                "its folder holds names of its code and no code: the data was list",
                "nothing was loaded",
                "--data SCRIPT.py:DATA",
            ),
        ),
        (
            ["--data={}:held_out"],
            (
                "without --model",
                "its folder holds names of its code and no code: the model was Tied",
                "nothing was loaded",
                "--model SCRIPT.py:Tied",
            ),
        ),
        (
            ["--data={}:held_out", "--model={}:Tied"],
            ("without --objective", "the objective was loss", "nothing was loaded", "--objective SCRIPT.py:loss"),
        ),
        (
            ["--model={}:Tie"],
            ("tied.py has no Tie", "NAME is defined at the top level", "nothing was started", "did you mean 'Tied'?"),
        ),
        (
            ["--model={}:Wide", "--data={}:held_out"],
            (
                "tied.py:Wide needs arguments: width",
                "it is called without arguments",
                "nothing was started",
                "a function of tied.py that returns Wide(width=…)",
            ),
        ),
        (
            ["--model={}:texts", "--data={}:held_out"],
            ("tied.py:texts, of type Tensor", "it names a torch.nn.Module", "nothing was loaded", "tied.py"),
        ),
        (["--model=Tied"], ("'Tied'", "code is named as FILE.py:NAME", "nothing was started", "Tied.py:NAME")),
        (
            ["--model=no.py:Tied"],
            ("no.py: No such file", "code is in a Python file", "nothing was started", "the path of the script"),
        ),
        (
            ["--model={}:Plain", "--data={}:held_out"],
            ("more.weight is missing", "of the one that was saved", "nothing was loaded", "its own --model"),
        ),
        (
            ["--model={}:Embedding", "--data={}:held_out"],
            ("for Embedding: weight is missing", "of the one that was saved", "nothing was loaded", "its own --model"),
        ),
        (
            ["--metrics={}:held_out"],
            ("tied.py:held_out, of type list", "it names a dict of name → Metric", "nothing was loaded", "tied.py"),
        ),
        (
            ["--collate-fn={}:pad"],
            ("--collate-fn ", "of the samples that --data names", "nothing was loaded", "--data FILE.py:NAME"),
        ),
        (
            ["--data={}:held_out", "--collate-fn={}:held_out"],
            ("tied.py:held_out, of type list", "a function of a list of samples", "nothing was loaded", "tied.py"),
        ),
        (["--data={}:loss"], ("needs arguments: outputs, batch", "without arguments", "nothing was started", "loss(")),
    ],
)
def test_code_that_is_missing_or_wrong(
    desk: Desk, run_dir: Path, script: str, options: list[str], parts: tuple[str, ...]
) -> None:
    done = desk.here("eval", str(run_dir), "--json", *(option.format(script) for option in options))
    assert done.code == 2
    (problem,) = done.json["problems"]
    for part, said in zip(parts, problem.values(), strict=True):
        assert part in said
    assert "Traceback" not in done.err


def test_tensors_that_the_model_lacks_are_refused(desk: Desk, run_dir: Path, script: str, tmp_path: Path) -> None:
    """A model with fewer tensors than the checkpoint is not the model that was saved."""
    less = tmp_path / "less.py"
    less.write_text(
        "from torch import nn\nclass Less(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.bias = nn.Linear(1, 1)\n    def forward(self, tokens): return tokens\n"
        "class None_(nn.Module):\n    def forward(self, tokens): return tokens\n"
    )
    done = desk.here("eval", str(run_dir), "--json", f"--model={less}:None_", f"--data={script}:held_out")
    assert done.code == 2
    assert "embed.weight is in the checkpoint only" in done.json["problems"][0]["given"]


def test_a_script_without_main_guard_trains_nothing(desk: Desk, run_dir: Path, tmp_path: Path) -> None:
    open_script = tmp_path / "open.py"
    open_script.write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    before = sorted(run_dir.rglob("*"))
    done = desk.here("eval", str(run_dir), "--json", f"--model={open_script}:Tied")
    assert done.code == 2
    (problem,) = done.json["problems"]
    assert problem["given"] == f"{open_script} enters a Trainer while it is read for what it defines"
    assert problem["nearest"] == "put it under: if __name__ == '__main__':"
    assert sorted(run_dir.rglob("*")) == before
    assert not (desk.folder / "runs").exists()


def test_verbs_that_have_no_code(desk: Desk, run_dir: Path, trained: Path, script: str) -> None:
    done = desk.here("train", "--json", f"--set=run.dir={run_dir}")
    assert done.code == 2
    assert done.json["problems"][0]["given"] == f"{run_dir}, the run of a Python script"
    written = desk.here("generate", str(run_dir))
    assert written.code == 2
    assert written.err.startswith("unisono: generate with data of your own, or no text\n")
    refused = desk.here("eval", str(trained), "--json", f"--model={script}:Tied")
    assert refused.code == 2
    assert refused.json["problems"][0]["given"] == f"--model for {trained}, a run of unisono train"
    assert desk.here("plan", "show", str(run_dir)).code == 0


def test_config_shows_the_settings_and_the_labels_of_the_code(desk: Desk, run_dir: Path) -> None:
    file = run_dir / "config.toml"
    for given in ([str(file)], [f"--set=run.dir={run_dir}"]):
        done = desk.here("config", "show", *given, "--origin")
        assert done.code == 0, done.err
        rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.out.splitlines()}
        assert rows["components.model"].startswith('"python:Tied"')
        assert rows["components.objective"].startswith('"python:loss"')
        assert rows["plan.global_batch"].split()[0] == "4"
        assert f"{file}:" in rows["plan.global_batch"]
    shown = tomllib.loads(desk.here("config", "show", str(file)).out)
    assert shown["components"]["data"] == "python:list"
    assert desk.here("config", "diff", str(file), str(file)).code == 0


def test_a_scripts_configuration_starts_no_run(desk: Desk, run_dir: Path) -> None:
    for verb in (("train",), ("plan", "export")):
        done = desk.here(*verb, str(run_dir / "config.toml"), "--json")
        assert done.code == 2
        (problem,) = done.json["problems"]
        assert problem["given"] == f"{run_dir}, the run of a Python script"
        assert (
            problem["nearest"] == f"run the script again; to evaluate it: unisono eval {run_dir} --model SCRIPT.py:NAME"
        )


def test_a_copy_of_the_folder_is_enough(desk: Desk, run_dir: Path, script: str, tmp_path: Path) -> None:
    """Nothing in the folder names the place where it was written."""
    moved = shutil.copytree(run_dir, tmp_path / "moved")
    assert evaluate(desk, moved, script).code == 0
