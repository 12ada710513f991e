"""``unisono checkpoint``: lists, verifies, converts, exports and imports checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unisono.cli.common import (
    ExpandedPath,
    FiniteRange,
    check_output,
    chosen_checkpoint,
    common_options,
    load_run,
    print_result,
    require_run,
    takes_checkpoint,
    trusts_python,
)
from unisono.cli.own_code import read_code, takes_model
from unisono.cli.termination import sigterm_interrupts
from unisono.errors import CheckpointError, ConfigError
from unisono.sanitize import listed, printable
from unisono.storage.run_folder import CHECKPOINTS_FOLDER, RUN_FILE
from unisono.storage.write_errors import explained_write_errors

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unisono.interop.stored_tensor import StoredTensor

_SUFFIXES: Final = {".params": "mxnet", ".ckpt": "mindspore"}
_FAMILIES: Final = ("resnet", "bert", "gpt2", "llama")


@click.group("checkpoint")
def command() -> None:
    """List, verify, convert, export, import checkpoints."""


@command.command("ls")
@click.argument("run_dir", default="runs/first")
@common_options
def ls(run_dir: str, as_json: bool) -> None:
    """List the checkpoints of RUN_DIR with their state and size."""
    if not os.path.isdir(run_dir):
        raise _nothing_at(run_dir, "nothing was listed")
    from unisono.checkpoint import list_checkpoints

    rows = [
        (e.step, e.state, sum(f.stat().st_size for f in e.path.iterdir() if f.is_file()), str(e.path))
        for e in list_checkpoints(Path(run_dir) / CHECKPOINTS_FOLDER)
    ]
    names = ("step", "state", "bytes", "path")
    checkpoints = [dict(zip(names, row, strict=True)) for row in rows]
    lines = [f"{step:>10}  {state:<12} {size / 2**20:8.1f} MiB  {path}" for step, state, size, path in rows]
    print_result(as_json, {"run_dir": run_dir, "checkpoints": checkpoints}, lines or f"no checkpoints in {run_dir}")


@command.command("verify")
@click.argument("path", default="runs/first")
@common_options
def verify_all(path: str, as_json: bool) -> int:
    """Read every byte of the checkpoints of a run (or of one checkpoint folder) and compare digests.

    Exit code 1 if any is bad.
    """
    root = Path(path)
    if not os.path.isdir(root):
        raise _nothing_at(path, "nothing was verified")
    from unisono.checkpoint import list_checkpoints, verify

    folders = [e.path for e in list_checkpoints(root / CHECKPOINTS_FOLDER) if e.state == "committed"]
    if not folders:
        if (root / CHECKPOINTS_FOLDER).is_dir() or (root / RUN_FILE).is_file():
            raise _nothing_at(path, "nothing was verified")
        folders = [root]
    results = [(str(folder), verify(folder)) for folder in folders]
    rows = [{"path": folder, "ok": not bad, "problems": [p.given for p in bad]} for folder, bad in results]
    lines: list[str] = []
    for folder, problems in results:
        lines.append(f"{'bad' if problems else 'ok':<4} {folder}")
        lines += ["     " + str(problem).replace("\n", "\n     ") for problem in problems]
    bad = any(problems for _, problems in results)
    print_result(as_json, {"ok": not bad, "checkpoints": rows}, lines)
    return int(bad)


def _nothing_at(path: str, consequence: str) -> CheckpointError:
    return CheckpointError(
        given=f"{path!r} holds no committed checkpoint" if os.path.isdir(path) else f"no folder {path!r}",
        rule="checkpoints lie in the folder 'checkpoints' of a run's folder",
        consequence=consequence,
        nearest="the folder given as run.dir when training (default runs/first)",
    )


@command.command("convert")
@click.argument("source")
@click.argument("target", type=ExpandedPath())
@click.option("--files", type=click.IntRange(min=1), default=1, show_default=True, help="Files to spread it over.")
@click.option("--drop-optimizer", is_flag=True, help="Keep the model and its averages only; no run resumes from it.")
@click.option("--average", is_flag=True, help="Averaged weights in place of the weights, and nothing else.")
@common_options
@sigterm_interrupts()
def convert_one(source: str, target: str, files: int, drop_optimizer: bool, average: bool, as_json: bool) -> None:
    """Write the checkpoint folder SOURCE again as TARGET/step-….

    Going on with other ranks or another plan needs no conversion: any checkpoint loads under any plan.
    """
    if not os.path.isdir(source):
        raise _nothing_at(source, "nothing was written")
    from unisono.checkpoint import convert, list_checkpoints

    inside = [e.path for e in list_checkpoints(Path(source) / CHECKPOINTS_FOLDER) if e.state == "committed"]
    if inside:
        raise CheckpointError(
            given=f"{source!r} is the folder of a run, no checkpoint",
            rule="one checkpoint is converted at a time",
            consequence="nothing was written",
            nearest=str(max(inside)),
        )
    folder = convert(Path(source), Path(target), files=files, keep_optimizer=not drop_optimizer, average=average)
    size = sum(file.stat().st_size for file in folder.iterdir())
    text = f"{source} written to {folder}, {size / 2**20:.1f} MiB"
    print_result(as_json, {"source": source, "path": str(folder), "bytes": size}, text)


@command.command("export")
@click.argument("run_dir", default="runs/first")
@click.argument("target", required=False, type=ExpandedPath())
@takes_checkpoint
@takes_model
@click.option(
    "--format",
    "kind",
    type=click.Choice(["huggingface", *_SUFFIXES.values()]),
    default="huggingface",
    show_default=True,
    help="A folder that transformers loads, or one file with the model's own names: MXNet's .params, MindSpore's .ckpt.",
)
@click.option(
    "--max-shard-gib",
    type=FiniteRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Most GiB of tensors in one file of a folder; above it there are several, and an index.",
)
@trusts_python
@common_options
@sigterm_interrupts()
def export_model(
    run_dir: str,
    target: str | None,
    checkpoint: str | None,
    best: bool,
    model: str | None,
    kind: str,
    max_shard_gib: float,
    as_json: bool,
) -> None:
    """Write RUN_DIR's newest model as a Hugging Face folder to TARGET (default RUN_DIR/export), or as one file.

    One tensor is in memory at a time; only a model whose construction reads its own values is built whole.
    The folder of a Python script's run holds no code: --model names it.
    """
    require_run(run_dir)
    file: Path | None = None
    if kind in _SUFFIXES.values():
        suffix = next(suffix for suffix, name in _SUFFIXES.items() if name == kind)
        file = Path(target) if target else Path(run_dir) / f"export{suffix}"
        check_output("TARGET", file, consequence="nothing was exported")
    config = load_run(run_dir, **read_code(model=model)).value
    checkpoint = chosen_checkpoint(run_dir, checkpoint, best=best)
    from unisono.dist import JobSpec, join_world
    from unisono.train.build import find_tokenizer
    from unisono.train.load import empty_model, open_run_checkpoint
    from unisono.train.run_export import export_run
    from unisono.train.whole_model import tensor_reader

    tokenizer = find_tokenizer(config)
    snapshot = open_run_checkpoint(config, join_world(JobSpec(), device_type="cpu", timeout_s=60.0), checkpoint)
    module = empty_model(config, tokenizer)
    read = tensor_reader(module, snapshot)
    if file is not None:
        path = _export_file(file, kind, module, read)
    else:
        path = export_run(
            module,
            config,
            tokenizer,
            Path(target) if target else None,
            read=read,
            max_shard_bytes=int(max_shard_gib * 2**30),
        )
    text = f"step {snapshot.step} exported to {path}"
    print_result(as_json, {"run_dir": run_dir, "step": snapshot.step, "path": str(path)}, text)


def _export_file(file: Path, kind: str, module: nn.Module, read: Callable[[str, Tensor], None]) -> Path:
    """Write the model's tensors, under its own names, to a file of another framework."""
    import torch

    from unisono.interop.weight_file import write_weights_file

    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)

    def values(name: str) -> Tensor:
        out = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
        read(name, out)
        return out

    with explained_write_errors(file.parent, consequence="nothing was exported", other_name="another file"):
        write_weights_file(file, kind, [(name, t.dtype, t.shape) for name, t in tensors.items()], values)
    return file


@command.command("import")
@click.argument("source", type=ExpandedPath(path_type=Path))
@click.option(
    "--out",
    required=True,
    type=ExpandedPath(path_type=Path),
    help="The new file: NAME.safetensors, or in another format NAME.params or NAME.ckpt. With --as the new folder.",
)
@click.option(
    "--as",
    "family",
    type=click.Choice(("auto", *_FAMILIES)),
    help="Write a folder for transformers and model.pretrained, with its names; auto: the model that the names say.",
)
@click.option(
    "-s",
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="With --as, a value of the folder's config.json that weights do not tell, such as num_attention_heads=12; not a setting "
    "of a run, as elsewhere. The last of a name counts.",
)
@common_options
@sigterm_interrupts()
def import_file(source: Path, out: Path, family: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Write the weights in SOURCE, a file of MXNet (.params) or MindSpore (.ckpt, .safetensors), again as safetensors.

    Names and values stay, but for arg: and aux: before names of MXNet. Sparse arrays become dense. Nothing in SOURCE is run.
    With --as, ResNet, BERT, GPT-2 and Llama of the public libraries become a folder of Hugging Face with the same outputs.
    """
    if family is not None:
        _import_model(source, out, family, _assignments(settings), as_json)
        return
    if settings:
        raise ConfigError(
            given=f"--set {settings[0]} without --as",
            rule="--set of this command gives values of config.json, which --as writes; it gives no settings of a run",
            consequence="nothing was written",
            nearest="--as auto with a folder as --out",
        )
    kind = {".safetensors": "safetensors", **_SUFFIXES}.get(out.suffix)
    if kind is None:
        raise ConfigError(
            given=f"--out {out}",
            rule=f"the name ends in .safetensors, {' or '.join(_SUFFIXES)}, which says the format; with --as it is a folder",
            consequence="nothing was written",
            nearest=str(out / "weights.safetensors" if out.is_dir() else out.with_suffix(".safetensors")),
        )
    check_output("--out", out, consequence="nothing was written")
    from unisono.interop.model_folder import known_model
    from unisono.interop.weight_file import open_weights, write_weights_file

    with open_weights(source) as weights:
        tensors = weights.tensors
        known = known_model(tensors)
        with explained_write_errors(out.parent, consequence="nothing was written", other_name="another file (--out)"):
            layout = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
            write_weights_file(out, kind, layout, lambda name: tensors[name].load())
        num_bytes, texts = out.stat().st_size, dict(weights.texts)
        result = {
            "source": str(source),
            "format": weights.format,
            "path": str(out),
            "bytes": num_bytes,
            "tensors": _described(tensors),
            "texts": texts,
            "model": known and known.label,
        }
    text = f"{len(tensors)} tensors of {source} ({weights.format}) written to {out}, {num_bytes / 2**20:.1f} MiB"
    if texts:
        text += f"; text that no tensor holds: {', '.join(texts)}"
    if known is not None:
        text += f"; with --as {known.family} the {known.label} becomes a folder that transformers loads"
    print_result(as_json, result, printable(text))


def _described(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    }


def _assignments(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE as names and values."""
    for text in texts:
        if "=" not in text:
            raise ConfigError(
                given=f"--set {text}",
                rule="a value of config.json has the form NAME=VALUE",
                consequence="nothing was written",
                nearest=f"--set {text}=…",
            )
    return {name.strip(): value.strip() for name, _, value in (text.partition("=") for text in texts)}


def _import_model(source: Path, out: Path, family: str, settings: dict[str, str], as_json: bool) -> None:
    """Write a folder with ``config.json`` and the weights under the names of a class of transformers."""
    check_output("--out", out, consequence="nothing was written")
    from unisono.interop.model_folder import as_model, write_model_folder
    from unisono.interop.weight_file import open_weights

    with open_weights(source) as weights:
        model = as_model(family, source, weights.tensors, settings)
        with explained_write_errors(out.parent, consequence="nothing was written", other_name="another folder (--out)"):
            write_model_folder(out, model)
        result = {
            "source": str(source),
            "format": weights.format,
            "path": str(out),
            "model": model.label,
            "architecture": model.config["architectures"][0],
            "tensors": _described(model.tensors),
            "left_out": list(model.left_out),
        }
    text = f"{model.label}: {len(model.tensors)} tensors of {source} written to {out}, as {result['architecture']}"
    if model.left_out:
        text += f"; left out: state of the optimizer, and counters: {listed(model.left_out, 200)}"
    print_result(as_json, result, printable(text))
