"""Every way a user can be wrong: four parts on standard error, once; exit code 2; nothing left behind."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import Desk, events_of, problem

from unisono.errors import Problem

NOTHING = "nothing was started"


def refused(desk: Desk, tmp_path: Path, *arguments: str) -> str:
    """Standard error of a run that must not begin, and of which nothing may be left."""
    done = desk.train(tmp_path / "runs/new", *arguments)
    assert done.code == 2, done
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []
    return done.err


# --- the configuration -----------------------------------------------------------------------------------------------


def test_unknown_key(desk: Desk, tmp_path: Path) -> None:
    assert refused(desk, tmp_path, "--set=optim.learning_rat=1") == problem(
        "--set: unknown key optim.learning_rat = 1",
        "only what is declared can be set in section [optim]",
        NOTHING,
        "one of: optim.kind, optim.lr, optim.weight_decay, optim.decay_exclude, optim.groups, optim.freeze, "
        "optim.clip_norm, optim.beta1, optim.beta2, optim.eps, optim.momentum, optim.nesterov, optim.trust_coefficient",
    )
    assert refused(desk, tmp_path, "--set=plan.globl_batch=1").endswith("  try:  did you mean plan.global_batch?\n")


def test_wrong_type(desk: Desk, tmp_path: Path) -> None:
    assert refused(desk, tmp_path, "--set=train.steps=many") == problem(
        '--set: train.steps = "many"',
        "train.steps takes a whole number",
        NOTHING,
        "--set train.steps=300 (the default)",
    )
    assert refused(desk, tmp_path, "--set=train.steps=2.0") == problem(
        "--set: train.steps = 2.0", "train.steps takes a whole number", NOTHING, "--set train.steps=2"
    )


def test_all_at_once(desk: Desk, tmp_path: Path) -> None:
    text = refused(desk, tmp_path, "--set=train.steps=many", "--set=optim.lr=-1", "--set=modl.dim=8")
    assert text.startswith("unisono: 3 problems\n1. --set: train.steps")
    assert text.count("  try:  ") == 3


def test_no_such_file(desk: Desk, tmp_path: Path) -> None:
    done = desk.here("train", "trian.toml", f"--set=run.dir={tmp_path}/new")
    assert done.code == 2
    assert done.err == problem(
        "no file trian.toml", "every configuration that is named exists", NOTHING, ". holds no .toml or .py file"
    )


def test_heads_that_do_not_divide(desk: Desk, tmp_path: Path) -> None:
    assert refused(desk, tmp_path, "--set=model.num_heads=3") == problem(
        "--set: model.num_heads: num_heads 3 with dim 16",
        "dim is divisible by num_heads, and each head's width is even (rotary pairs)",
        "the attention cannot be built",
        "num_heads in {1, 2, 4}",
    )


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.system ['touch owned']", "os:system", "os.system('touch owned')", "__import__('os')"],
)
def test_a_hostile_value_is_text_that_names_nothing(desk: Desk, tmp_path: Path, text: str) -> None:
    assert refused(desk, tmp_path, f"--set=components.model={text}") == problem(
        f"components.model = {text!r}",
        "it is built in (auto, bert, gpt, mlp, moe, resnet, resnet101, resnet14, resnet152, resnet26, resnet50), an installed "
        "entry point of the group 'unisono.models' (none here), or a callable of a Python file",
        "the run lacks this component, and nothing was started",
        "one of: auto, bert, gpt, mlp, moe, resnet, resnet101, resnet14, resnet152, resnet26, resnet50; or code of your own, "
        "in a Python file as unisono init --python writes one",
    )
    assert "takes a whole number" in refused(desk, tmp_path, f"--set=model.num_layers={text}")
    assert not (desk.folder / "owned").exists()


@pytest.mark.parametrize("command", [("train", "--debug"), ("plan", "fit")])
def test_a_model_of_ones_own_in_a_toml_file_is_told_where_it_belongs(desk: Desk, command: tuple[str, ...]) -> None:
    (desk.folder / "mine.toml").write_text('[components]\nmodel = "mine.py:Net"\n')
    outcome = desk.here(*command, "mine.toml")
    assert outcome.code == 2
    assert "unisono: components.model = 'mine.py:Net'\n" in outcome.err
    assert "in a Python file as unisono init --python writes one\n" in outcome.err


# --- the plan --------------------------------------------------------------------------------------------------------


def test_impossible_batch_arithmetic(desk: Desk, tmp_path: Path) -> None:
    assert refused(desk, tmp_path, "--set=plan.micro_batch=8") == problem(
        "micro_batch 8 with global_batch 4 on 1 ranks",
        "a micro-batch is part of a rank's share of the step",
        "the share is only 4 samples",
        "plan.micro_batch=4, or plan.global_batch=8",
    )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_cuda_asked_for_and_absent(desk: Desk, tmp_path: Path) -> None:
    assert refused(desk, tmp_path, "--set=plan.device=cuda") == problem(
        "plan.device 'cuda'",
        f"this torch ({torch.__version__}) sees only the CPU",
        NOTHING,
        "plan.device='cpu', or a torch built for 'cuda' and its driver",
    )


def test_a_choice_that_would_act_on_nothing(desk: Desk, tmp_path: Path) -> None:
    assert refused(desk, tmp_path, "--set=plan.recompute=full") == problem(
        "plan.recompute='full' for GPT",
        "it acts on repeated blocks: a ModuleList or Sequential with two or more members of one class",
        "it would change nothing",
        "plan.recompute='none', or keep the blocks in a ModuleList",
    )


# --- the data --------------------------------------------------------------------------------------------------------


def test_two_copies_need_two_servers(desk: Desk, tmp_path: Path) -> None:
    settings = ("--set=launch.num_replicas=2", "--set=plan.sync=dist_async")
    assert refused(desk, tmp_path, *settings) == problem(
        "launch.num_replicas 2 with 1 server",
        "a replica is on another server than its primary",
        NOTHING,
        "launch.num_servers=2, or launch.num_replicas=1",
    )


@pytest.mark.full
def test_a_synchronous_run_says_that_it_needs_no_servers(desk: Desk, tmp_path: Path) -> None:
    settings = ("--set=launch.num_servers=2", "--set=plan.device=cuda")
    done = desk.process("train", f"--set=run.dir={tmp_path}/new", *desk.settings, *settings)
    assert done.code == 2
    said, _, rest = done.err.partition("\n")
    assert said == "no servers are started: plan.sync 'auto' all-reduces gradients among the ranks"
    assert rest.startswith("unisono: plan.device 'cuda'\n")


def test_vocabulary_too_small_for_the_data(desk: Desk, tmp_path: Path) -> None:
    assert refused(desk, tmp_path, "--set=model.vocab_size=256") == problem(
        "a model vocabulary of 256 for data with 257 token ids",
        "the model's vocabulary is at least the tokenizer's",
        "ids 256..256 would have no embedding",
        "vocab_size 320, the next multiple of 64",
    )


def test_missing_corpus(desk: Desk, tmp_path: Path) -> None:
    assert refused(desk, tmp_path, "--set=data.corpus=nowhere/text") == problem(
        f"corpus 'nowhere/text': no file or folder {desk.folder}/nowhere/text",
        "the corpus is 'stdlib', a folder of text files or one text file",
        "there is nothing to train on",
        f"the nearest folder that exists is {desk.folder}; 'stdlib' always exists",
    )


def test_empty_corpus(desk: Desk, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    rule = "a corpus has at least one file with text in it"
    nearest = "'stdlib', or the path of a folder or file with text"
    assert refused(desk, tmp_path, f"--set=data.corpus={empty}") == problem(
        f"corpus '{empty}': the folder {empty} holds no files", rule, "there is nothing to train on", nearest
    )
    (empty / "a.txt").write_text("")
    (empty / "b.txt").write_text("")
    assert refused(desk, tmp_path, f"--set=data.corpus={empty}") == problem(
        f"corpus '{empty}': 2 file(s), 0 bytes, no text for the train part",
        rule,
        "there is nothing to train on",
        nearest,
    )


def test_data_shorter_than_one_window(desk: Desk, tmp_path: Path) -> None:
    text = refused(desk, tmp_path, "--set=data.seq_len=100000")
    tokens = int(text.split()[4])
    assert text == problem(
        f"train data of {tokens} tokens with seq_len 100000",
        "the data holds at least one window: seq_len tokens and the one that follows",
        "there is no sample to read",
        f"seq_len <= {tokens - 1}, or more text",
    )


# --- extras ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a plain ``pip install unisono``."""
    names = ("tokenizers", "tensorboard", "wandb")
    for loaded in [name for name in sys.modules if name.partition(".")[0] in names]:
        monkeypatch.delitem(sys.modules, loaded)
    for name in names:
        # what importlib reports for a name that is known to be absent
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
@pytest.mark.usefixtures("without_extras")
def test_a_tracker_that_is_not_installed(desk: Desk, tmp_path: Path, tracker: str) -> None:
    assert refused(desk, tmp_path, f'--set=observe.trackers=["{tracker}"]') == problem(
        f"tracker {tracker!r} needs the package {tracker!r}, which is not installed",
        "it comes with the extra 'track'",
        NOTHING,
        "pip install 'unisono[track]'",
    )


def test_a_tokenizer_whose_package_is_not_installed(
    desk: Desk, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In a process whose Python really does not find it."""
    side = tmp_path_factory.mktemp("side")
    (side / "sitecustomize.py").write_text(
        "import sys\nclass Absent:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'tokenizers': raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    (side / "tokenizer.json").write_text("{}")
    done = desk.process(
        *(
            "train",
            "--debug",
            f"--set=run.dir={tmp_path}/new",
            *desk.settings,
            f"--set=data.tokenizer={side}/tokenizer.json",
        ),
        PYTHONPATH=str(side),
    )
    assert done.code == 2
    assert done.err == problem(
        f"the tokenizer file '{side}/tokenizer.json' needs the package 'tokenizers', which is not installed",
        "it comes with the extra 'hf'",
        NOTHING,
        "pip install 'unisono[hf]'",
    )
    assert list(tmp_path.iterdir()) == []


# --- the run's folder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inside", "why"), [("file/run", "Not a directory"), ("file", "File exists")])
def test_a_run_folder_that_cannot_be_written(desk: Desk, tmp_path: Path, inside: str, why: str) -> None:
    (tmp_path / "file").write_text("mine")
    done = desk.train(tmp_path / inside)
    assert done.code == 2
    assert done.err == problem(
        f"run.dir '{tmp_path}/{inside}': {why}",
        "a run keeps its configuration, events and checkpoints in a folder it can write to",
        NOTHING,
        "run.dir in a folder of your own, such as runs/first",
    )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no folder on Linux")
def test_a_run_folder_where_the_system_takes_none(desk: Desk) -> None:
    done = desk.train("/proc/unisono/run")
    assert done.code == 2
    assert done.err.startswith("unisono: run.dir '/proc/unisono/run': No such file or directory\n")


def test_a_bad_setting_does_not_outlive_its_command(desk: Desk, tmp_path: Path) -> None:
    """A folder that was there stays; the configuration of a run that could not begin is not kept in it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "notes.txt").write_text("mine")
    for wrong in ("--set=model.vocab_size=256", "--set=data.corpus=nowhere", "--set=plan.recompute=full"):
        assert desk.train(run_dir, wrong).code == 2
    assert (run_dir / "notes.txt").exists()
    assert not (run_dir / "config.toml").exists()
    good = desk.here("config", "show", f"--set=run.dir={run_dir}", "--json").json["values"]
    assert good["data.corpus"] == {"value": '"stdlib"', "origin": "default"}


def test_a_checkpoint_of_another_model(desk: Desk, mine: Path) -> None:
    kept = (mine / "config.toml").read_text()
    before = sorted(path.name for path in mine.rglob("*"))
    done = desk.here("train", "--debug", f"--set=run.dir={mine}", "--set=model.dim=32")
    assert done.code == 2
    more = int(done.err.partition("; and ")[2].split()[0])  # all but the norms, and both moments of each
    assert more > 20
    assert done.err == problem(
        f"the checkpoint {mine}/checkpoints/step-00000004 for this run: "
        "model/blocks.0.attention.k.weight is [8, 16] torch.float32 there, [16, 32] torch.float32 here; "
        "model/blocks.0.attention.out.weight is [16, 16] torch.float32 there, [32, 32] torch.float32 here; "
        "model/blocks.0.attention.q.weight is [16, 16] torch.float32 there, [32, 32] torch.float32 here; "
        "model/blocks.0.attention.v.weight is [8, 16] torch.float32 there, [16, 32] torch.float32 here; "
        f"and {more} more",
        "a resumed run has the model, optimizer and options the checkpoint was saved with",
        "nothing was loaded and nothing was changed",
        "use the configuration saved in the run's folder, or another run.dir for a new run",
    )
    assert (mine / "config.toml").read_text() == kept
    new = {path.name for path in mine.rglob("*")} - set(before)
    assert new <= {"logs", "failure-rank-0.json"}
    assert events_of(mine)[-1]["reason"] == "failed"
    assert desk.here("train", "--debug", f"--set=run.dir={mine}", "--json").json["step"] == 4


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "step-00000002/../../elsewhere",
            "'elsewhere' is no checkpoint; those are directories called like step-00000120",
        ),
        ("step-2", "'step-2' is no checkpoint; those are directories called like step-00000120"),
        ("step-00000009", "a link is no checkpoint; those are directories called like step-00000120"),
        ("step-00000003", "COMMIT is missing"),
    ],
)
def test_a_path_to_resume_from_that_is_no_checkpoint(desk: Desk, mine: Path, name: str, why: str) -> None:
    (mine / "elsewhere").mkdir()
    (mine / "checkpoints/step-00000009").symlink_to(mine / "checkpoints/step-00000002")
    path = mine / "checkpoints" / name
    done = desk.here("train", "--debug", f"--set=run.dir={mine}", f"--set=run.resume={path}", "--set=train.steps=6")
    assert done.code == 2
    assert done.err == problem(
        f"{path}: {why}",
        "every file of a checkpoint has the size and digest its manifest says, and COMMIT seals the manifest",
        "it will not be resumed from",
        'resume = "auto" moves it into quarantine and takes the one before',
    )


def test_a_hugging_face_folder_is_no_checkpoint(desk: Desk, mine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    exported = desk.here("checkpoint", "export", str(mine), str(folder))
    assert exported.code == 0, exported.err
    done = desk.here("train", "--debug", f"--set=run.dir={mine}", f"--set=run.resume={folder}", "--set=train.steps=6")
    assert done.code == 2
    assert done.err == problem(
        f"resume from {folder}, a Hugging Face model folder",
        "a run resumes from a checkpoint: weights, optimizer state, schedule and position in the data",
        "nothing was loaded",
        f"a folder checkpoints/step-… of a run; to fine-tune these weights, a new run with model.pretrained={folder}",
    )


RESUME_RULE = "a run resumes from a checkpoint: weights, optimizer state, schedule and position in the data"
FROM_MODEL = "a folder checkpoints/step-… of a run; to fine-tune these weights, a new run with model.pretrained=./NAME"
OF_RUN = "a run resumes from a checkpoint: one folder step-… in the folder checkpoints of a run"
CONTINUE = "run.dir=./NAME, which continues that run; or one of ls -d ./NAME/checkpoints/step-*"


@pytest.mark.parametrize(
    ("files", "given", "rule", "nearest"),
    [
        (["config.json", "a.safetensors"], "resume from ./NAME, a Hugging Face model folder", RESUME_RULE, FROM_MODEL),
        (["config.toml"], "resume from ./NAME, the folder of a run", OF_RUN, CONTINUE),
        (["other"], "resume 'NAME'", "auto, strict, never, or a path (with a '/')", "run.resume='./NAME'"),
        ([], "resume 'NAME'", "auto, strict, never, or a path (with a '/')", "run.resume='./NAME' if it is a folder"),
    ],
)
def test_the_name_of_a_folder_to_resume_from_is_answered_at_once(
    files: list[str], given: str, rule: str, nearest: str, desk: Desk
) -> None:
    folder = desk.folder / "NAME"
    for name in files:
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    done = desk.here("train", "--debug", "--set=run.dir=new", "--set=run.resume=NAME")
    shutil.rmtree(folder, ignore_errors=True)
    assert done.code == 2
    consequence = "it is unclear what to resume from" if given == "resume 'NAME'" else "nothing was loaded"
    assert done.err == problem(f"--set: run.resume: {given}", rule, consequence, nearest)


def test_the_folder_of_a_run_is_no_checkpoint(desk: Desk, mine: Path, tmp_path: Path) -> None:
    done = desk.here("train", "--debug", f"--set=run.dir={tmp_path}/new", f"--set=run.resume={mine}")
    assert done.code == 2
    assert done.err == problem(
        f"resume from {mine}, the folder of a run",
        OF_RUN,
        "nothing was loaded",
        f"run.dir={mine}, which continues that run; or one of ls -d {mine}/checkpoints/step-*",
    )


def test_eval_with_a_configuration_of_another_model(desk: Desk, mine: Path) -> None:
    text = (mine / "config.toml").read_text()
    (mine / "config.toml").write_text(text.replace("\ndim = 16\n", "\ndim = 32\n"))
    done = desk.here("eval", str(mine))
    assert done.code == 2
    assert done.err == problem(
        f"the checkpoint {mine}/checkpoints/step-00000004 for GPT: embedding.weight is missing or of another shape, "
        "and 10 more",
        "the model has the names and shapes of the one that was saved",
        "nothing was loaded",
        "the configuration in the run's own folder, or for the run of a script its own --model",
    )


@pytest.mark.parametrize("agent", [{}, {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}])
def test_a_master_address_that_does_not_resolve_ends_the_start_after_the_time_out(
    desk: Desk, tmp_path: Path, agent: dict[str, str]
) -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    master = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29513"}
    arguments = [f"--set=run.dir={tmp_path}/run", "--set=launch.timeout_s=1", *desk.settings]
    done = desk.process("train", *arguments, **ranks, **master, **agent)
    assert done.code == 1
    assert "rank 1 of 2 found no store at no-such-host.invalid:29513 in 1 s (the name does not resolve" in done.err


@pytest.mark.parametrize("verb", ["eval", "generate", "checkpoint export"])
def test_sizes_in_a_configuration_are_compared_with_the_checkpoint_first(desk: Desk, mine: Path, verb: str) -> None:
    """A model of such sizes would take all memory."""
    text = (mine / "config.toml").read_text()
    for layers, dim in ((60_000, 16), (2, 1 << 20)):
        (mine / "config.toml").write_text(
            re.sub(r"\nnum_layers = \d+\ndim = 16\n", f"\nnum_layers = {layers}\ndim = {dim}\n", text)
        )
        done = desk.here(*verb.split(), str(mine))
        assert done.code == 2, done.err
        wrong = f"model.num_layers {layers} for" if layers > 2 else "is missing or of another shape"
        assert wrong in done.err
        assert "so:   nothing was loaded" in done.err


def test_a_folder_that_holds_no_run(desk: Desk, tmp_path: Path) -> None:
    for verb in ("eval", "generate"):
        done = desk.here(verb, str(tmp_path))
        assert done.code == 2
        assert done.err == problem(
            f"run folder '{tmp_path}'",
            "a run's folder holds its config.toml",
            "it is unknown which model and data to use",
            "the folder given as run.dir when training (default runs/first)",
        )


def test_a_run_without_a_checkpoint(desk: Desk, mine: Path) -> None:
    for path in (mine / "checkpoints").iterdir():
        (path / "COMMIT").unlink()
    done = desk.here("generate", str(mine))
    assert done.code == 2
    assert done.err == problem(
        f"run folder '{mine}'",
        f"a trained model is in a committed checkpoint under {mine}/checkpoints",
        "there is no model to load",
        f"train first: unisono train --set run.dir={mine}",
    )


# --- through the launcher --------------------------------------------------------------------------------------------


def test_two_launched_ranks_say_it_once(desk: Desk, mine: Path) -> None:
    """Another world size under ``strict``, and what a user sees of a user error of several processes."""
    kept = (mine / "config.toml").read_text()
    done = desk.process(
        "train",
        f"--set=run.dir={mine}",
        "--set=launch.num_processes=2",
        "--set=run.resume=strict",
        "--set=train.steps=6",
    )
    assert done.code == 2
    given, rest = done.err.split("\n", 1)
    assert given.startswith(
        f"unisono: resume 'strict' from {mine}/checkpoints/step-00000004 with world 1 then, 2 now; "
    )
    assert rest == problem(
        "",
        "strict resumes only where every bit can be the same",
        "nothing was loaded and nothing was changed",
        "restore what differs, or run.resume='auto' to resume without bit-exactness",
    ).removeprefix("unisono: \n")
    assert (mine / "config.toml").read_text() == kept


def test_a_launch_that_cannot_begin_leaves_nothing(desk: Desk, tmp_path: Path) -> None:
    done = desk.process(
        "train", f"--set=run.dir={tmp_path}/runs/new", *desk.settings, "--set=plan.micro_batch=8", "--json"
    )
    assert (done.code, done.err) == (2, "")
    assert done.json["error"] == "PlanError"
    assert [Problem(**each).given for each in done.json["problems"]] == ["micro_batch 8 with global_batch 4 on 1 ranks"]
    assert list(tmp_path.iterdir()) == []
