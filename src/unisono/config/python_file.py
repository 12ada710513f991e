"""A Python file as a configuration, ``def config() -> RunConfig``, or for one object of it, ``FILE.py:NAME``.

The file is executed once, from the very bytes that are digested, so the digest always belongs to the code that ran
(an import could pick up a stale ``.pyc``). Its folder is importable while it runs and not afterwards. Modules it
imports stay imported, as they must for its classes and functions to keep working. The content of those modules is not part
of the digest.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from unisono.config.toml_file import config_problem, read_config_file
from unisono.errors import ConfigError, Problem, nearest_name

FUNCTION = "config"
_PREFIX = "unisono_config_"  # of the name of the module that a file becomes
_RUNNING: ContextVar[Path | None] = ContextVar("_RUNNING", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonFile:
    """A file that was run: absolute path, and digest of its content."""

    path: Path
    digest: str


_EXECUTED: dict[str, PythonFile] = {}


def executed_files() -> dict[str, PythonFile]:
    """The files that were executed in this process, by the names of their modules."""
    return {name: file for name, file in _EXECUTED.items() if name in sys.modules}


def execute_again(file: PythonFile) -> None:
    """Make the module of a file that another process executed, for what that process pickled.

    Raises ConfigError if it has another content now, or for any exception inside.
    """
    source = _read(file.path)
    if _digest(source) != file.digest:
        given = f"{file.path}, which has changed since the run began"
        raise ConfigError(config_problem(given, "all processes of a run have the same code", "start the run again"))
    with _blamed_on(file.path, "the file defines names and raises nothing"):
        _execute(file.path, source)


def run_python(path: Path, cls: type, check: Callable[[str], None]) -> tuple[object, PythonFile]:
    """Call the file's ``config()``, which returns an instance of ``cls``. Any exception inside becomes a ConfigError.

    ``check`` is called with the digest of the content before the file is executed, and may raise.
    """
    source = read_config_file(path)
    check(_digest(source))
    with _running(path, f"{FUNCTION}() returns a {cls.__name__} without raising"):
        module, digest = _execute(path, source)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonObject:
    """The object that ``FILE.py:NAME`` names."""

    path: Path
    name: str
    value: Any

    def call(self) -> Any:
        """Call it without arguments. Raises ConfigError where it needs some, and for any exception inside."""
        with suppress(ValueError, TypeError):  # no signature is known
            parameters = inspect.signature(self.value).parameters.values()
            variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            if needed := [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]:
                raise ConfigError(
                    config_problem(
                        f"{self.path.name}:{self.name} needs arguments: {', '.join(needed)}",
                        "it is called without arguments",
                        f"a function of {self.path.name} that returns {self.name}({', '.join(f'{n}=…' for n in needed)})",
                    )
                )
        with _running(self.path, f"{self.name}() returns without raising"):
            return self.value()


def read_objects(*texts: str) -> list[PythonObject]:
    """The object of each ``FILE.py:NAME``. A file is executed once, and not as ``__main__``.

    Raises:
        ConfigError: A text has another form, there is no such file or name, or the file raises.
    """
    modules: dict[Path, ModuleType] = {}
    objects: list[PythonObject] = []
    for text in texts:
        file, _, name = text.rpartition(":")
        path = Path(file)
        if path.suffix != ".py" or not name.isidentifier():
            given, nearest = f"{text!r}", f"{Path(text.partition(':')[0]).stem or 'script'}.py:NAME"
            raise ConfigError(config_problem(given, "code is named as FILE.py:NAME", nearest))
        if path not in modules:
            source = _read(path)
            with _running(path, "the file defines names and raises nothing"):
                modules[path], _ = _execute(path, source)
        if not hasattr(modules[path], name):
            names = [known for known in vars(modules[path]) if not known.startswith("__")]
            given, nearest = f"{text!r}: {path.name} has no {name}", nearest_name(name, names)
            raise ConfigError(config_problem(given, "NAME is defined at the top level of the file", nearest))
        objects.append(PythonObject(path=path, name=name, value=getattr(modules[path], name)))
    return objects


def refuse_in_file(action: str) -> None:
    """Raise ConfigError if this code runs because a Python file is read for what it defines."""
    if (path := _RUNNING.get()) is not None:
        raise ConfigError(
            config_problem(
                f"{path} {action} while it is read for what it defines",
                "a file that is named for its model, data or configuration trains nothing",
                "put it under: if __name__ == '__main__':",
            )
        )


def _digest(source: bytes) -> str:
    return blake2b(source, digest_size=16).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return read_config_file(path)
    except OSError as error:
        given = f"{path}: {error.strerror}"
        raise ConfigError(
            config_problem(given, "code is in a Python file that can be read", "the path of the script")
        ) from None


def _execute(path: Path, source: bytes) -> tuple[ModuleType, str]:
    """Run the file as a new module; also returns the digest of its content."""
    digest = _digest(source)
    module = ModuleType(_PREFIX + digest[:12])
    module.__file__ = str(path)
    _EXECUTED[module.__name__] = PythonFile(path=path.resolve(), digest=digest)
    sys.modules[module.__name__] = module  # dataclasses and inspect look classes up through their module
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module, digest


@contextmanager
def _running(path: Path, rule: str) -> Generator[None]:
    """Run code of the file: its neighbours can be imported, and exceptions name its line."""
    token = _RUNNING.set(path)
    try:
        with _importable(path.parent.resolve()), _blamed_on(path, rule):
            yield
    finally:
        _RUNNING.reset(token)


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
def _blamed_on(path: Path, rule: str) -> Generator[None]:
    """Turn an exception of the user's code into one that names the user's file and line."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line, text, rule = error.lineno, error.msg, "the file is valid Python"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)
            text = str(error).partition("\n")[0]
        source = read_config_file(path).decode("utf-8", "replace").splitlines()
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
