"""A Python file as a configuration: ``def config() -> RunConfig``.

The file is executed once, from the very bytes that are digested, so the digest always belongs to the code that ran
(an import could pick up a stale ``.pyc``). Its folder is importable while it runs and not afterwards. Modules it
imports stay imported, as they must for its classes and functions to keep working. The content of those modules is not part
of the digest.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import FunctionType, ModuleType

from unisono.config.toml_file import config_problem
from unisono.errors import ConfigError, Problem

FUNCTION = "config"


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonFile:
    """A file that was run: absolute path, and digest of its content."""

    path: Path
    digest: str


def run_python(path: Path, cls: type) -> tuple[object, PythonFile]:
    """Call the file's ``config()``, which returns an instance of ``cls``. Any exception inside becomes a ConfigError."""
    source = path.read_bytes()
    digest = blake2b(source, digest_size=16).hexdigest()
    module = ModuleType(f"unisono_config_{digest[:12]}")
    module.__file__ = str(path)
    with _importable(path.parent.resolve()), _blamed_on(path, cls):
        sys.modules[module.__name__] = module  # dataclasses and inspect look classes up through their module
        try:
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            del sys.modules[module.__name__]
            raise
        function = getattr(module, FUNCTION, None)
        if not callable(function):
            raise ConfigError(_no_function(path, cls, module))
        value: object = function()
    if not isinstance(value, cls):
        line = f":{function.__code__.co_firstlineno}" if isinstance(function, FunctionType) else ""
        given = f"{path}{line}: {FUNCTION}() returned {_a(type(value).__name__)}"
        rule = f"{FUNCTION}() returns a {cls.__name__}"
        raise ConfigError(config_problem(given, rule, f"return {cls.__name__}(...)"))
    return value, PythonFile(path=path.resolve(), digest=digest)


@contextmanager
def _importable(folder: Path) -> Generator[None]:
    """The file may import its neighbours, as a script may."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(str(folder))


@contextmanager
def _blamed_on(path: Path, cls: type) -> Generator[None]:
    """Turn an exception of the user's code into one that names the user's file and line."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        rule = f"{FUNCTION}() returns a {cls.__name__} without raising"
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line, text, rule = error.lineno, error.msg, "the file is valid Python"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)
            text = str(error).partition("\n")[0]
        source = path.read_bytes().decode("utf-8", "replace").splitlines()
        at, nearest = "", f"repair {path.name}"
        if line and line <= len(source):
            at, nearest = f":{line}", f"look at line {line}: {source[line - 1].strip()}"
        raise ConfigError(config_problem(f"{path}{at}: {type(error).__name__}: {text}", rule, nearest)) from error


def _no_function(path: Path, cls: type, module: ModuleType) -> Problem:
    value = getattr(module, FUNCTION, None)
    given = "defines no function config" if value is None else f"config is {_a(type(value).__name__)}, not a function"
    signature = f"def {FUNCTION}() -> {cls.__name__}"
    functions = [name for name, item in vars(module).items() if inspect.isfunction(item) and FUNCTION in name]
    nearest = f"rename {functions[0]} to {FUNCTION}" if functions else f"add {signature}: return {cls.__name__}()"
    return config_problem(f"{path}: {given}", f"a Python configuration file has {signature}", nearest)


def _a(name: str) -> str:
    return "None" if name == "NoneType" else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
