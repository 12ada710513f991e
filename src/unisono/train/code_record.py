"""The code of a run, recorded so that an edited body, constant or attribute is noticed on resume.

A record is a text for each part, ``"the code of `loss`"`` or ``"`alpha` of `Net`"``, with its value or a digest. Objects without
a value that is the same in every process, such as open files, are recorded by type. Paths are not recorded, and neither is the
code of installed packages.
"""

from __future__ import annotations

import dis
import enum
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

Parts = dict[str, str]
# bytecode differs between versions of Python
PYTHON = sys.implementation.cache_tag
FORMAT = 1
_CODE, _DATA = "code:", "data:"  # how a digest begins
_MAX_TEXT = 80  # characters of a value that is recorded as it is
_MAX_BYTES = 64 << 20  # of a tensor or array whose content is recorded
_MAX_DEPTH = 6
_MAX_ITEMS = 10_000  # of a list, set or dict whose content is recorded
_NUMBERS = (bool, int, float, complex)
_LIBRARIES = ("torch", "unisono")
# flags of a code object that change what it does: the kinds of its arguments, and whether it is a generator or a coroutine
_FLAGS = 0x04 | 0x08 | 0x20 | 0x80 | 0x200
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
_STDLIB = sysconfig.get_path("stdlib")


class RunCode:
    """The code of a run's functions and of its model. ``start`` is the record of a run that begins.

    Attributes:
        start: Record by setting, such as ``objective``, and of ``model``; as JSON.
    """

    def __init__(self, functions: Mapping[str, Any], model: ModelRecord) -> None:
        self._functions = {name: code for name, code in functions.items() if code is not None}
        self._model = model
        self.start = self._read()

    def unchanged(self) -> dict[str, Any]:
        """``start`` without the values that training has changed, such as a counter of calls."""
        now = self._read()["parts"]
        parts = {
            setting: {text: value for text, value in recorded.items() if now[setting].get(text) == value}
            for setting, recorded in self.start["parts"].items()
        }
        return {**self.start, "parts": parts}

    def _read(self) -> dict[str, Any]:
        parts = {name: code_parts(code) for name, code in self._functions.items()}
        return {"format": FORMAT, "python": PYTHON, "parts": {**parts, "model": self._model.parts()}}


class ModelRecord:
    """The plain attributes of a model's modules, and the code of ``forward`` of the user's classes. Of the unsharded model."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(type(module), weakref.ref(module), _attributes(module)) for module in model.modules()]
        code = _Recorder()
        for cls in dict.fromkeys(cls for cls, _, _ in self._modules):
            code.add_methods(cls, ("forward",), 0)
        self._code = code.parts

    def parts(self) -> Parts:
        """The record, without the attributes that have changed since."""
        values: dict[str, list[str]] = {}
        changed: set[str] = set()
        for cls, reference, attributes in self._modules:
            module = reference()
            for name, value in attributes.items():
                text = f"`{name}` of `{cls.__name__}`"
                values.setdefault(text, []).append(value)
                if module is not None and _text_or_digest(_plain(vars(module).get(name))) != value:
                    changed.add(text)
        merged = {text: of[0] if len(set(of)) == 1 else _digest("\n".join(of)) for text, of in values.items()}
        return {**self._code, **{text: value for text, value in merged.items() if text not in changed}}


def code_parts(code: Callable[..., Any] | Any) -> Parts:
    """The record of a function, a partial of one, or an object that is called."""
    recorder = _Recorder()
    recorder.add_callable(code, 0)
    return recorder.parts


def code_differences(saved: Mapping[str, Any], current: Mapping[str, Any], settings: set[str]) -> list[str]:
    """One text for each recorded part of ``settings`` that is another one; parts that only one of both has are left out."""
    if not saved or not current or saved["format"] != current["format"]:
        return []
    texts: list[str] = []
    for setting, now in current["parts"].items():
        then = saved["parts"].get(setting, {})
        for text in now if setting in settings else ():
            before, after = then.get(text, now[text]), now[text]
            if before == after or (saved["python"] != current["python"] and after.startswith(_CODE)):
                continue
            digests = before.startswith((_CODE, _DATA)) or after.startswith((_CODE, _DATA))
            texts.append(f"{setting}: {text} " + ("has changed" if digests else f"{before} then, {after} now"))
    return texts


def name_of_argument(value: Any) -> str:
    """``repr(value)``; the name of what has no other ``repr`` than its address, or has functions in it."""
    text = repr(value)
    if " at 0x" not in text:
        return text
    return str(getattr(value, "__qualname__", type(value).__qualname__))


class _Recorder:
    """Collects parts; what it has seen already is not followed again."""

    def __init__(self) -> None:
        self.parts: Parts = {}
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # no id is used twice

    def add_callable(self, code: Any, depth: int) -> None:
        if id(code) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen.add(id(code))
        self._alive.append(code)
        if isinstance(code, partial):
            function = cast("partial[Any]", code)
            named = {**{str(number): value for number, value in enumerate(function.args)}, **function.keywords}
            for name, value in named.items():
                self._add(f"argument `{name}` of `{_name(function.func)}`", value, depth, follow=True)
            self.add_callable(function.func, depth)
        elif isinstance(code, MethodType):
            self.add_callable(code.__func__, depth)
            self._add_owner(code.__self__, code.__func__, depth)
        elif isinstance(code, FunctionType):
            self._add_function(code, depth)
        elif isinstance(code, type):
            self.add_methods(
                code, tuple(name for name, value in vars(code).items() if isinstance(value, FunctionType)), depth
            )
        elif (wrapped := _wrapped(code)) is not None:
            self.add_callable(wrapped, depth + 1)
        else:
            self._add_object(code, depth)

    def add_methods(self, cls: type, names: Iterable[str], depth: int) -> None:
        """The code of these methods, and of methods that they name, of a class that is the user's."""
        for method in _methods(cls, names):
            self.add_callable(method, depth)

    def _add_function(self, function: FunctionType, depth: int) -> None:
        code, name = function.__code__, _name(function)
        is_library = _is_library(function)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if isinstance(value, Mapping):  # of a configuration, what the function reads: other entries may change
                value = _read_entries(cast("Mapping[Any, Any]", value), code)
            if not is_library or _is_code(value):
                self._add(f"`{variable}` of `{name}`", value, depth)
        if is_library:
            return
        self._put(f"the code of `{name}`", _digest("\n".join(_code_texts(code)), _CODE))
        defaults = function.__defaults__ or ()
        parameters = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for parameter, value in [*zip(parameters, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]:
            self._add(f"the default of `{parameter}` of `{name}`", value, depth)
        for variable in dict.fromkeys(_global_names(code)):
            value = function.__globals__.get(variable)
            here = isinstance(value, FunctionType) and value.__module__ == function.__module__
            if here or _is_loss(value) or (_plain(value) and _is_number(value)):
                self._add(f"`{variable}` of `{name}`", value, depth)

    def _add_object(self, value: Any, depth: int) -> None:
        cls = type(value)
        self._add_attributes(value, depth, None)
        if isinstance(value, nn.Module):
            for name, buffer in vars(value).get("_buffers", {}).items() if depth == 0 or _is_loss(value) else ():
                self._add(f"`{name}` of `{cls.__name__}`", buffer, depth)
            for part in value.children():
                self.add_callable(part, depth + 1)
        self.add_methods(cls, ("forward", "__call__"), depth)

    def _add_owner(self, owner: Any, method: Any, depth: int) -> None:
        """The methods and attributes of an object that one of its methods names."""
        called = [] if isinstance(owner, nn.Module) else ["__call__"]
        names = called + (_names(method) if isinstance(method, FunctionType) else [])
        self.add_methods(type(owner), names, depth)
        more = {name for other in _methods(type(owner), names) for name in _names(other)}
        self._add_attributes(owner, depth, {*names, *more})

    def _add_attributes(self, value: Any, depth: int, names: set[str] | None) -> None:
        """The public attributes of an object; only those in ``names``, if they are given."""
        for name, attribute in _public(value).items():
            if names is None or name in names:
                self._add(f"`{name}` of `{type(value).__name__}`", attribute, depth, follow=True)

    def _add(self, text: str, value: Any, depth: int, *, follow: bool = False) -> None:
        """The value of a part. ``follow``: also the attributes of an object that is called."""
        plain = _plain(value)
        if plain:
            self._put(text, _text_or_digest(plain))
        elif isinstance(value, Tensor | np.ndarray):
            self._put(text, _tensor_digest(cast("Any", value)))
        elif isinstance(value, list | tuple) and any(map(callable, cast("list[Any]", value))):
            items = cast("list[Any]", value)
            self._put(text, f"{len(items)} items")
            for number, item in enumerate(items[:64]):
                self._add(f"{text}[{number}]", item, depth + 1, follow=follow)
        else:
            self._put(text, f"a {type(value).__qualname__}")
            is_part = follow and callable(value) and not isinstance(value, nn.Module) and _is_followed(type(value))
            if _is_code(value) or _is_loss(value) or is_part:
                self.add_callable(value, depth + 1)

    def _put(self, text: str, value: str) -> None:
        if text in self.parts:
            text += f" ({sum(other.startswith(text) for other in self.parts) + 1})"
        self.parts[text] = value


def _name(code: Any) -> str:
    name = str(getattr(code, "__qualname__", type(code).__qualname__)).rpartition("<locals>.")[2]
    return "lambda" if name == "<lambda>" else name


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | partial) or _wrapped(value) is not None


def _wrapped(value: Any) -> Any:
    """The function in a wrapper such as that of ``functools.cache``; None if there is none."""
    return getattr(value, "__dict__", {}).get("__wrapped__")


def _methods(cls: type, names: Iterable[str]) -> Iterator[FunctionType]:
    """Methods by name, and those that they name, of a class that is the user's."""
    waiting, done = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        method = getattr(cls, name, None)
        if name in done or not isinstance(method, FunctionType) or _is_library(method):
            continue
        done.add(name)
        yield method
        waiting += _names(method)


def _read_entries(value: Mapping[Any, Any], code: CodeType) -> dict[Any, Any]:
    """The entries whose keys are constants of the code."""
    keys = {constant for part in _nested(code) for constant in part.co_consts if isinstance(constant, str | int)}
    return {key: part for key, part in value.items() if isinstance(key, str | int) and key in keys}


def _names(function: FunctionType) -> list[str]:
    return [name for code in _nested(function.__code__) for name in code.co_names]


def _is_loss(value: Any) -> bool:
    """Whether it is a module without parameters: others are models, which change."""
    return isinstance(value, nn.Module) and next(value.parameters(), None) is None


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, cast("tuple[Any, ...]", value)))
    return isinstance(value, _NUMBERS)


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_installed(filename: str) -> bool:
    return "site-packages" in filename or "dist-packages" in filename or filename.startswith((_STDLIB, "<frozen"))


def _is_library(function: FunctionType) -> bool:
    return _root(function.__module__) in _LIBRARIES or _is_installed(function.__code__.co_filename)


def _is_followed(cls: type) -> bool:
    """Whether objects of this class are compared where they stand in others: not those of other installed packages."""
    if _root(cls.__module__) in _LIBRARIES:
        return True
    return not _is_installed(str(getattr(sys.modules.get(cls.__module__), "__file__", None) or ""))


def _public(value: Any) -> dict[str, Any]:
    """The public attributes of an object, without those that every module has."""
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})
    skipped = _TORCH_ATTRIBUTES if isinstance(value, nn.Module) else frozenset[str]()
    return {str(name): part for name, part in found.items() if not str(name).startswith("_") and name not in skipped}


def _attributes(module: nn.Module) -> dict[str, str]:
    """The plain attributes of a module that ``extra_repr`` does not show."""
    cls, shown = type(module), module.extra_repr()
    if _root(cls.__module__) == "torch" and shown:
        return {}
    private_too = _root(cls.__module__) not in _LIBRARIES and _is_followed(cls)
    found: dict[str, str] = {}
    for name, value in vars(module).items():
        if name in _TORCH_ATTRIBUTES or name == "name_or_path" or (name.startswith("_") and not private_too):
            continue
        plain = _plain(value) if isinstance(value, (*_NUMBERS, str, tuple)) else ""
        if plain and f"{name}={value!r}" not in shown:
            found[name] = _text_or_digest(plain)
    return found


def _plain(value: Any, depth: int = 0) -> str:
    """A text of a value that says all of it and is the same in every process; empty for other values, paths, and large ones."""
    if depth > _MAX_DEPTH:  # it may contain itself
        return ""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, str):
        return "" if os.sep in value or os.path.isabs(value) else repr(str(value))
    if value is None or isinstance(value, (*_NUMBERS, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if not isinstance(value, Mapping | set | frozenset | tuple | list) or len(cast("list[Any]", value)) > _MAX_ITEMS:
        return ""
    plain = partial(_plain, depth=depth + 1)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        parts = [f"{key}: {part}" if (key := plain(name)) and (part := plain(v)) else "" for name, v in items]
        return _joined(parts, "{}")
    if isinstance(value, set | frozenset):
        return _joined(sorted(map(plain, cast("set[Any]", value))), "{}")
    return _joined(list(map(plain, cast("list[Any]", value))), "()" if isinstance(value, tuple) else "[]")


def _joined(parts: list[str], brackets: str) -> str:
    return f"{brackets[0]}{', '.join(parts)}{brackets[1]}" if all(parts) else ""


def _text_or_digest(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else _digest(text)


def _digest(text: str, kind: str = _DATA) -> str:
    return kind + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _tensor_digest(value: Any) -> str:
    """A digest of a tensor's or array's values; of one that is trained, large, or of objects, only its shape."""
    shape = f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Tensor):
        if value.requires_grad or value.device.type == "meta" or value.numel() * value.element_size() > _MAX_BYTES:
            return shape
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    elif value.dtype.hasobject or value.nbytes > _MAX_BYTES:
        return shape
    return _DATA + blake2b(shape.encode() + np.ascontiguousarray(value).tobytes(), digest_size=12).hexdigest()


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _global_names(code: CodeType) -> Iterator[str]:
    for part in _nested(code):
        yield from (str(i.argval) for i in dis.get_instructions(part) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _code_texts(code: CodeType) -> Iterator[str]:
    """The instructions with their constants and names; no file, line or docstring."""
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    yield f"{counts} {code.co_flags & _FLAGS} {code.co_varnames}"
    yield code.co_exceptiontable.hex()
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        if isinstance(value, CodeType):
            yield f"{instruction.opname} {value.co_name}"
            yield from _code_texts(value)
        else:
            yield f"{instruction.opname} {_constant(value)}"


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):  # its order differs between processes
        return "{" + ", ".join(sorted(map(_constant, cast("frozenset[Any]", value)))) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_constant, cast("tuple[Any, ...]", value))) + ")"
    return repr(value)
