"""Declares options, and derives the flat view of a tree of options classes that the other modules read.

An options class is a frozen, kw-only dataclass. A leaf is a field made with ``option``; a section is a plain field
whose type is again such a dataclass. Leaves hold the values of TOML: booleans, numbers, strings, ``Literal``, arrays
(``tuple``, ``list``) and string-keyed tables (``dict``), unions of those, and ``None`` (written ``"none"``). This
module only declares; ``validate`` checks values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from unisono.config.renames import OptionRenames

_SPEC = "unisono"
_CALLABLE = get_origin(Callable[[], None])
_SCALARS = (bool, int, float, str)
BASE = "base"  # the one top-level key of a TOML file that is no option: the layer beneath

D = TypeVar("D")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The arguments of ``option`` for one field, apart from its default."""

    help: str = ""
    applies_with: str = ""
    instead_of: str = ""
    choices: tuple[Any, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    python_only: bool = False


def option(
    default: D,
    help: str,
    *,
    applies_with: str = "",
    instead_of: str = "",
    choices: Sequence[Any] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    python_only: bool = False,
) -> D:
    """Declare one leaf of an options class.

    For arrays and tables the limits and choices hold for each element; ``None`` is exempt.

    Args:
        default: Value if no layer sets the option; dicts and lists are copied for every instance.
        help: One sentence for ``unisono config explain``, the starter file and the JSON schema.
        applies_with: Condition under which the option applies, in words: "plan.pp above 1"; empty means always. Outside of it a
            value other than the default is reported, as an error or a notice.
        instead_of: Name of an option of the same section that this one replaces: a layer that sets one of the two unsets what
            lower layers say of the other.
        choices: Allowed values; None allows every value of the type.
        ge: Lower bound, inclusive; None is no bound.
        gt: Lower bound, exclusive.
        le: Upper bound, inclusive.
        lt: Upper bound, exclusive.
        python_only: Marks a ``str | Callable`` field: files, ``--set`` and the environment give it strings, only a Python
            file gives it a callable, or, where the type has ``Mapping[str, Callable]`` too, callables by name.
    """
    allowed = None if choices is None else tuple(choices)
    limits: dict[str, Any] = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    spec = Spec(
        help=help, applies_with=applies_with, instead_of=instead_of, choices=allowed, python_only=python_only, **limits
    )
    metadata = {_SPEC: spec}
    if isinstance(default, dict | list):
        mutable = cast("dict[Any, Any] | list[Any]", default)
        return cast(D, field(default_factory=mutable.copy, metadata=metadata))
    return cast(D, field(default=default, metadata=metadata))


def options_repr(self: Any) -> str:
    """``__repr__`` of an options class: the call that makes an equal object, without defaults; code by its name."""
    changed: list[str] = []
    for each in fields(self):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        value = getattr(self, each.name)
        if value != default:
            changed.append(f"{each.name}={value.__qualname__ if hasattr(value, '__qualname__') else repr(value)}")
    return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One option in place: dotted ``key``, the ``type`` TOML may give it (no ``None``, no callable), its default."""

    key: str
    type: Any
    optional: bool
    default: Any
    spec: Spec
    choices: tuple[Any, ...] | None

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionTree:
    """All leaves and all sections (``""`` is the root) of an options class by dotted key, in order of declaration.

    ``renames`` is the class variable RENAMES of the class, where it has one: keys of earlier versions."""

    cls: type
    leaves: dict[str, Leaf]
    sections: dict[str, type]
    renames: OptionRenames = OptionRenames()

    def members(self, section: str) -> list[str]:
        """Names of the leaves and sub-sections directly inside ``section``."""
        return [declared.name for declared in fields(self.sections[section])]

    def leaves_of(self, section: str) -> list[Leaf]:
        """The leaves directly inside ``section``."""
        keys = (join(section, name) for name in self.members(section))
        return [self.leaves[key] for key in keys if key in self.leaves]


def join(section: str, name: str) -> str:
    """The dotted key of ``name`` inside ``section``."""
    return f"{section}.{name}" if section else name


@cache
def option_tree(cls: type) -> OptionTree:
    """The flat view of an options class. Raises TypeError for a declaration that TOML cannot express."""
    layout = OptionTree(cls=cls, leaves={}, sections={}, renames=getattr(cls, "RENAMES", OptionRenames()))
    _collect(layout, cls, "", None)
    if BASE in layout.members(""):
        raise TypeError(f"{cls.__name__}.{BASE}: the name is taken by the layering key of TOML files")
    return layout


def _collect(layout: OptionTree, cls: type, section: str, instance: object | None) -> None:
    """Add ``cls`` and the sections below it; ``instance`` is the section's own default, if its parent has one."""
    layout.sections[section] = cls
    hints = get_type_hints(cls)
    for declared in fields(cls):
        key, hint = join(section, declared.name), hints[declared.name]
        default = _default(declared) if instance is None else getattr(instance, declared.name)
        if isinstance(hint, type) and is_dataclass(hint):
            _collect(layout, hint, key, None if default is MISSING else default)
        else:
            layout.leaves[key] = _leaf(key, hint, default, declared)


def _default(declared: Field[Any]) -> Any:
    if declared.default_factory is not MISSING:
        return declared.default_factory()
    return declared.default


def _leaf(key: str, hint: Any, default: Any, declared: Field[Any]) -> Leaf:
    spec = cast(Spec, declared.metadata.get(_SPEC, Spec()))
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = tuple(arm for arm in arms if arm is not NoneType and not _is_callable_type(arm))
    if default is MISSING or callable(default):
        raise TypeError(f"{key}: an option needs a default that TOML can write")
    if not plain or not all(map(_is_plain, plain)) or any(map(_is_callable_type, arms)) != spec.python_only:
        raise TypeError(f"{key}: an option cannot have the type {hint}")
    only = plain[0] if len(plain) == 1 else None
    return Leaf(
        key=key,
        type=Union[plain],  # noqa: UP007 - built from a tuple
        optional=NoneType in arms,
        default=default,
        spec=spec,
        choices=get_args(only) if get_origin(only) is Literal else spec.choices,
    )


def _is_callable_type(arm: Any) -> bool:
    by_name = get_origin(arm) is Mapping and _is_callable_type(get_args(arm)[-1])
    return by_name or _CALLABLE in (arm, get_origin(arm))


def _is_plain(hint: Any) -> bool:
    """Whether TOML can write every value of the type."""
    if hint in _SCALARS:
        return True
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return all(map(_is_plain, args))
    if origin is Literal:
        return all(isinstance(choice, str | int) for choice in args)
    if origin in (tuple, list):
        return all(_is_plain(arg) for arg in args if arg is not Ellipsis)
    return origin is dict and args[0] is str and _is_plain(args[1])


# ---------------------------------------------------------------------------------------------- in words

_ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_MANY = {bool: "booleans", int: "whole numbers", float: "numbers", str: "strings"}


def type_words(leaf: Leaf) -> str:
    """The type as a reader of TOML files would say it: ``a number or "none"``."""
    return " or ".join([*_arm_words(leaf.type), *(['"none"'] if leaf.optional else [])])


def limit_words(spec: Spec) -> str:
    """The range in signs, ``>= 0 and < 1``; empty where there is none."""
    bounds = ((">=", spec.ge), (">", spec.gt), ("<=", spec.le), ("<", spec.lt))
    return " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)


def _arm_words(hint: Any) -> Iterator[str]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Union:
        for arm in args:
            yield from _arm_words(arm)
    elif origin is Literal:
        yield from (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in args)
    elif origin is dict:
        yield f"a table of {_many(args[1])}"
    elif origin in (tuple, list):
        length = "" if origin is list or args[-1] is Ellipsis else f"{len(args)} "
        yield f"an array of {length}{_many(args[0])}"
    else:
        yield _ONE[hint]


def _many(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_many, get_args(hint)))
    if get_origin(hint) is dict:
        return f"tables of {_many(get_args(hint)[1])}"
    return _MANY[hint] if hint in _MANY else "values, each " + " or ".join(_arm_words(hint))
