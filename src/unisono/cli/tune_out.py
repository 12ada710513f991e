"""Option ``--out`` of ``unisono tune``, and the errors of a folder that cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from unisono.cli.common import ExpandedPath
from unisono.cli.terminal import is_of_output
from unisono.storage.write_errors import explained_write_errors

F = TypeVar("F", bound=Callable[..., Any])


def takes_out(help: str) -> Callable[[F], F]:
    """Decorator that adds ``--out``; a folder that cannot be written is an error in four parts, whenever that is found."""

    def decorate(function: F) -> F:
        @wraps(function)
        def with_out(*arguments: Any, out: str, **options: Any) -> Any:
            printing: OSError | None = None
            with explained_write_errors(
                Path(out),
                consequence="the command is not finished; what was written before is kept",
                other_name="another folder (--out)",
            ):
                try:
                    return function(*arguments, out=out, **options)
                except OSError as error:
                    if not is_of_output(error):
                        raise
                    printing = error
            raise printing

        return click.option("--out", required=True, type=ExpandedPath(file_okay=False), help=help)(cast(F, with_out))

    return decorate
