"""The table of docs/moving.md: lines of each program of examples/ported, before and after.

    python tests/support/ported_table.py [--write]

Without ``--write`` it fails where the page is not as it would write it. Blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "ported"
PAGE = ROOT / "docs" / "moving.md"
BEGIN = "<!-- lines: written by tests/support/ported_table.py --write -->"
END = "<!-- end of lines -->"
# by the beginning of a program's name
ORIGINS = {
    "accelerate": "Accelerate",
    "ddp": "DistributedDataParallel",
    "lightning": "Lightning",
    "mindspore": "MindSpore",
    "mxnet": "MXNet Gluon",
    "timm": "timm",
    "transformers": "transformers",
}
_NO_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> list[str]:
    """Lines of ``source`` without indentation, and without blank lines, comments and docstrings.

    >>> code_lines('"One."\\n\\nx = (\\n    1  # two\\n)\\n# three\\n')
    ['x = (', '1', ')']
    """
    kept: set[int] = set()
    comments: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.start[1]
        elif token.type not in _NO_CODE:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            kept.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = source.splitlines()
    return [lines[number - 1][: comments.get(number)].strip() for number in sorted(kept)]


def table() -> str:
    """A row for each program."""
    rows = ["| program | written for | lines before | lines after | unchanged |", "|---|---|---|---|---|"]
    for folder in sorted(path.parent for path in PROGRAMS.glob("*/before.py")):
        before, after = (code_lines((folder / f"{name}.py").read_text()) for name in ("before", "after"))
        blocks = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
        unchanged = sum(block.size for block in blocks)
        origin = ORIGINS[folder.name.partition("_")[0]]
        rows.append(f"| `{folder.name}` | {origin} | {len(before)} | {len(after)} | {unchanged} |")
    return "\n".join(rows)


def page() -> str:
    """The page with the table of today."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    wanted = page()
    if arguments == ["--write"]:
        PAGE.write_text(wanted)
    return int(wanted != PAGE.read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
