"""The pairs of snippets on the pages docs/from-*.md, from the functions of examples/migrate.

    python tests/support/migration_pages.py [--write]

Without ``--write`` it fails where a page is not as it would write it. A function of after.py has a docstring: a title, and a
text. Beside its body stands the body of the function of that name in before.py, both without their last ``return``. A
function of before.py that has a docstring has no counterpart; its text takes the right column. ``# --- Section ---`` in after.py
begins a section.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from migration import EXAMPLES, ORIGINS, ROOT, functions

END = "<!-- end of pairs -->"


def begin(origin: str) -> str:
    return f"<!-- pairs of {origin}: written by tests/support/migration_pages.py --write -->"


def page_path(origin: str) -> Path:
    return ROOT / "docs" / f"from-{origin}.md"


def body(origin: str, side: str, node: ast.FunctionDef) -> str:
    """The lines of a function that a page shows."""
    lines = (EXAMPLES / origin / f"{side}.py").read_text().splitlines()
    first, last = node.body[0], node.body[-1]
    begins = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", []))])
    start = first.end_lineno if ast.get_docstring(node) is not None else begins - 1
    end = last.lineno - 1 if isinstance(last, ast.Return) else last.end_lineno
    return "\n".join(line.removeprefix("    ") for line in lines[start:end]).strip("\n")


def text_of(node: ast.FunctionDef) -> tuple[str, str]:
    """Title and text of a docstring, of which each paragraph is one line."""
    title, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
    return title, rest


def cells(left: str, right: str) -> str:
    """A row of two columns, as Markdown within a table of HTML."""
    return f'<tr><td valign="top" width="50%">\n\n{left}\n\n</td><td valign="top" width="50%">\n\n{right}\n\n</td></tr>'


def code(text: str) -> str:
    return f"```py\n{text}\n```"


def sections(origin: str) -> Iterator[tuple[int, str]]:
    """Line and title of each section of after.py."""
    for number, line in enumerate((EXAMPLES / origin / "after.py").read_text().splitlines(), start=1):
        if title := re.fullmatch(r"# --- (.*) ---", line):
            yield number, title[1]


def pairs(origin: str) -> str:
    """All of them, one below the other."""
    before = {node.name: node for node in functions(origin, "before")}
    order = list(before)
    starts = list(sections(origin))
    parts: list[str] = []
    for node in functions(origin, "after"):
        while starts and starts[0][0] < node.lineno:
            parts.append(f"## {starts.pop(0)[1]}")
        title, text = text_of(node)
        left = code(body(origin, "before", before[node.name]))
        parts.append(_pair(origin, title, text, left, code(body(origin, "after", node))))
        for name in order[order.index(node.name) + 1 :]:
            title, text = text_of(before[name])
            if not title:
                break
            parts.append(_pair(origin, title, "", code(body(origin, "before", before[name])), text))
    return "\n\n".join(parts)


def _pair(origin: str, title: str, text: str, left: str, right: str) -> str:
    head = f"<tr><th>{ORIGINS[origin].title}</th><th>unisono</th></tr>"
    note = f"{text}\n\n" if text else ""
    return f'### {title}\n\n{note}<table class="pairs">\n{head}\n{cells(left, right)}\n</table>'


def page(origin: str) -> str:
    """The page with the pairs of today."""
    text = page_path(origin).read_text()
    head, rest = text.split(begin(origin))
    return f"{head}{begin(origin)}\n\n{pairs(origin)}\n\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    differs = False
    for origin in ORIGINS:
        wanted = page(origin)
        differs |= wanted != page_path(origin).read_text()
        if arguments == ["--write"]:
            page_path(origin).write_text(wanted)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
