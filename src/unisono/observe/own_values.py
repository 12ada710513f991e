"""Values that a user's loop logs: one number by name and step, in the event log and all that is made of it."""

from __future__ import annotations

import re
from typing import Any

from unisono.errors import ConfigError
from unisono.observe.events import ENVELOPE, EventLog
from unisono.sanitize import is_secret

_NAME = re.compile(r"[A-Za-z_][\w.-]*(/[\w.-]+)*", re.ASCII)
# first parts of names of a run's own numbers, and names that rows and events have
_GROUPS = frozenset({"train", "eval", "perf", "mem", "time", "comm"})
_FIELDS = ENVELOPE | {"self", "step", "steps_total", "epochs_total", "eta_s", "unit"}


def log_value(events: EventLog, step: int, name: str, value: Any) -> None:
    """Record ``value``, a number or anything with one (a tensor or array of one element), under ``name`` at ``step``.

    Raises:
        ConfigError: The name is not plain, is one of the run's own or that of a secret, or the value is no number.
    """
    taken = name.partition("/")[0] in _GROUPS or name in _FIELDS
    if not _NAME.fullmatch(name) or taken or is_secret(name):
        if taken:
            rule = f"{', '.join(sorted(_GROUPS))} and {', '.join(sorted(_FIELDS))} are names of the run's own numbers"
        elif is_secret(name):
            rule = "a value whose name is that of a secret is never written"
        else:
            rule = "a name has ASCII letters, digits, _ . - and / between its parts"
        plain = "" if is_secret(name) else re.sub(r"[^\w.]+", "_", name, flags=re.ASCII).strip("_")
        raise ConfigError(
            given=f"log of {name!r}",
            rule=rule,
            consequence="nothing was logged",
            nearest=f"run.log('own/{plain or 'value'}', …)",
        )
    try:
        number = None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        sizes = getattr(value, "shape", None)
        shape = f" {list(sizes)}" if sizes is not None else ""
        raise ConfigError(
            given=f"log of {name!r} with a {type(value).__name__}{shape}",
            rule="a logged value is one number, or a tensor or array of one element",
            consequence="nothing was logged",
            nearest=f"run.log({name!r}, values.mean())",
        )
    events.emit("log", step=step, **{name: number})
