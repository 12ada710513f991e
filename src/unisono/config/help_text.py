"""Options in words: one key explained, and a starter file that shows them all."""

from __future__ import annotations

from unisono.config.fields import BASE, Leaf, OptionTree, limit_words, option_tree, type_words
from unisono.config.json_schema import section_help
from unisono.config.validate import nearest_keys
from unisono.config.values import SET, assignment, encode, env_name, shown, toml_value
from unisono.errors import ConfigError


def explain(cls: type, key: str) -> str:
    """Describe an option or section of ``cls``, and how to set it; ``key`` ``""`` means all. Raises ConfigError if unknown."""
    layout = option_tree(cls)
    if key in layout.leaves:
        return _explain_leaf(layout.leaves[key])
    if key in layout.sections:
        return _explain_section(layout, key)
    raise ConfigError(
        given=f"no option {key}",
        rule="only an option or a section can be explained",
        consequence="nothing was explained",
        nearest=nearest_keys(layout, key),
    )


def starter(cls: type) -> str:
    """A TOML file with every section of ``cls`` and, commented out, every option at its default; loads to the defaults."""
    layout = option_tree(cls)
    lines = [
        f"# {cls.__name__}: every option with its default. Remove the # before a line to change it.",
        "#",
        "# The file beneath this one, if any (.toml or .py, relative to this file):",
        f'# {BASE} = "other.toml"',
    ]
    for section, owner in layout.sections.items():
        leaves = layout.leaves_of(section)
        if section and leaves:
            lines += ["", f"[{section}]", *([f"# {words}"] if (words := section_help(owner)) else [])]
        for leaf in leaves:
            facts = "; ".join([type_words(leaf), *(f"{name} {words}" for name, words in _limits(leaf))])
            lines += ["", f"# {leaf.spec.help} ({facts})", f"# {leaf.name} = {toml_value(encode(leaf.default))}"]
    return "\n".join(lines) + "\n"


def _limits(leaf: Leaf) -> list[tuple[str, str]]:
    limits: list[tuple[str, str]] = []
    if leaf.spec.choices is not None:  # a Literal is spelled out by its type
        limits.append(("choices", ", ".join(shown(choice) for choice in leaf.spec.choices)))
    if words := limit_words(leaf.spec):
        limits.append(("range", words))
    return limits


def _explain_leaf(leaf: Leaf) -> str:
    section = leaf.key.rpartition(".")[0]
    header = [f"[{section}]"] if section else []
    python = [("python", "a callable, in the config() of a Python file")] if leaf.spec.python_only else []
    rows = [
        ("type", type_words(leaf)),
        *python,
        *_limits(leaf),
        *([("applies with", leaf.spec.applies_with)] if leaf.spec.applies_with else []),
        ("default", toml_value(encode(leaf.default))),
        ("TOML", "\n            ".join([*header, f"{leaf.name} = {toml_value(encode(leaf.default))}"])),
        ("--set", assignment(SET, leaf.key, leaf.default)),
        ("env", assignment(f"env {env_name(leaf.key)}", leaf.key, leaf.default)),
    ]
    return "\n".join([leaf.key, f"  {leaf.spec.help}", *(f"  {name:<9} {text}" for name, text in rows)])


def _explain_section(layout: OptionTree, section: str) -> str:
    words = section_help(layout.sections[section])
    inside = [key for key in layout.leaves if key.startswith(f"{section}." if section else "")]
    width = max(map(len, inside))
    rows = [
        f"  {key:<{width}}  {toml_value(encode(layout.leaves[key].default))}  {layout.leaves[key].spec.help}"
        for key in inside
    ]
    return "\n".join([f"[{section}]" if section else layout.cls.__name__, *([f"  {words}"] if words else []), *rows])
