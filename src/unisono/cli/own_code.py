"""Options that name the code of a Python script's run, as ``FILE.py:NAME``: model, data, collate_fn, objective and metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import click

from unisono.config.python_file import PythonObject, read_objects
from unisono.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def takes_model(function: F) -> F:
    """Decorator that adds ``--model``."""
    return click.option(
        "--model",
        metavar="FILE.py:NAME",
        help="For the run of a Python script: its module, or a class or function without arguments that makes it.",
    )(function)


def takes_evaluation(function: F) -> F:
    """Decorator that adds ``--data``, ``--collate-fn``, ``--objective`` and ``--metrics``."""
    function = click.option(
        "--metrics",
        multiple=True,
        metavar="NAME",
        help="Likewise: a metric by name, or FILE.py:NAME of a dict of them; may be repeated. Default: the run's built-in ones.",
    )(function)
    function = click.option(
        "--objective",
        metavar="NAME",
        help="Likewise: FILE.py:NAME of the loss that Trainer got, or a built-in one by name. Default: the run's, if built in.",
    )(function)
    function = click.option(
        "--collate-fn",
        metavar="FILE.py:NAME",
        help="Likewise: the collate_fn that Trainer got. A DataLoader as --data has its own.",
    )(function)
    return click.option(
        "--data",
        metavar="FILE.py:NAME",
        help="Likewise: the held-out samples as Trainer takes eval_data, or a function that returns them.",
    )(function)


def read_code(
    *,
    model: str | None = None,
    data: str | None = None,
    collate_fn: str | None = None,
    objective: str | None = None,
    metrics: Sequence[str] = (),
) -> dict[str, Any]:
    """The components that the options name, as ``load_run`` takes them. Runs the named files, each once.

    Raises:
        ConfigError: A text names nothing, or something of another kind; or ``collate_fn`` has no data to collate.
    """
    if collate_fn is not None and data is None:
        raise ConfigError(
            given=f"--collate-fn {collate_fn} without --data",
            rule="it makes batches of the samples that --data names",
            consequence="nothing was loaded",
            nearest="--data FILE.py:NAME beside it",
        )
    texts = {
        "model": model,
        "data": data,
        "collate_fn": collate_fn,
        "objective": objective if objective and ":" in objective else None,
    }
    named = {option: text for option, text in texts.items() if text is not None}
    # unlike an objective's name, that of a built-in metric may have a colon: f1:10
    files = [text for text in metrics if ":" in text and ".py" in text]
    objects = read_objects(*named.values(), *files)
    found = dict(zip(named, objects, strict=False))
    code: dict[str, Any] = {}
    if "model" in found:
        code["model"] = _labelled(lambda _config: _model(found["model"]), found["model"])
    if "data" in found:
        held_out = _data(found["data"], found.get("collate_fn"))
        code["data"] = _labelled(lambda _config: (held_out, held_out), found["data"])
    if objective is not None:
        code["objective"] = found["objective"].value if "objective" in found else objective
    if metrics:
        code["metrics"] = tuple(text for text in metrics if text not in files)
        own: dict[str, Any] = {}
        for given in objects[len(named) :]:
            own |= _metrics(given)
        code["own_metrics"] = lambda _config: own
    return code


def _labelled(function: Callable[[Any], Any], given: PythonObject) -> Callable[[Any], Any]:
    """``function`` under the name of the object that it is for, which a configuration then shows for it."""
    function.__qualname__ = given.name
    return function


def _model(given: PythonObject) -> Any:
    from torch import nn

    value = given.value if isinstance(given.value, nn.Module) or not callable(given.value) else given.call()
    if not isinstance(value, nn.Module):
        raise _wrong(
            "--model", given, value, "a torch.nn.Module, or a class or function without arguments that makes one"
        )
    return value


def _data(given: PythonObject, collate_fn: PythonObject | None) -> Any:
    from unisono.train.input_pipeline import read_eval_source

    if collate_fn is not None and not callable(collate_fn.value):
        raise _wrong("--collate-fn", collate_fn, collate_fn.value, "a function of a list of samples")
    called = inspect.isroutine(given.value) or inspect.isclass(given.value)
    return read_eval_source(given.call() if called else given.value, collate_fn.value if collate_fn else None)


def _metrics(given: PythonObject) -> Mapping[str, Any]:
    from unisono.train.metrics import Metric

    value = given.call() if inspect.isroutine(given.value) else given.value
    if not (isinstance(value, Mapping) and all(isinstance(metric, Metric) for metric in cast("Any", value).values())):
        raise _wrong("--metrics", given, value, "a dict of name → Metric, as Trainer takes it")
    return cast("Mapping[str, Any]", value)


def _wrong(option: str, given: PythonObject, value: object, rule: str) -> ConfigError:
    kind = f"the class {value.__name__}" if inspect.isclass(value) else f"of type {type(value).__name__}"
    return ConfigError(
        given=f"{option} {given.path}:{given.name}, {kind}",
        rule=f"it names {rule}",
        consequence="nothing was loaded",
        nearest=f"the name in {given.path.name} that is one",
    )
