"""Rules for the initial values of parameters: tables of ``match``, a pattern of names, ``kind`` and its constants. Torch-free.

Kinds and defaults are those of MXNet 1.9 (``mxnet.initializer``), with ``normal`` for its sigma named ``std``. The fans of a
weight are its dims 1 (in) and 0 (out), each times the size of the dims after them.

    xavier      scale = sqrt(magnitude / fan); uniform in ±scale, or gaussian with that standard deviation
    msra_prelu  gaussian xavier of magnitude 2 / (1 + slope²) (He et al. 2015)
    orthogonal  scale times the singular vectors of a random matrix [dim 0, the other dims] (Saxe et al. 2014)
    normal, uniform (in ±scale), constant, zeros, ones

``factor`` chooses the fan: in, out, or avg of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from unisono.errors import Problem, nearest_name

InitRule = Mapping[str, str | float]

_DISTRIBUTIONS: Final = ("uniform", "gaussian")
_FACTORS: Final = ("avg", "in", "out")
# kind -> its constants and their defaults; None must be given
KINDS: Final[dict[str, dict[str, str | float | None]]] = {
    "xavier": {"distribution": "uniform", "factor": "avg", "magnitude": 3.0},
    "msra_prelu": {"factor": "avg", "slope": 0.25},
    "orthogonal": {"distribution": "uniform", "scale": 1.414},
    "normal": {"std": 0.01},
    "uniform": {"scale": 0.07},
    "constant": {"value": None},
    "zeros": {},
    "ones": {},
}
_CHOICES: Final = {"distribution": _DISTRIBUTIONS, "factor": _FACTORS}
_POSITIVE: Final = ("magnitude", "scale", "std")


def rule_problems(rules: Sequence[InitRule]) -> Iterator[Problem]:
    """Problems of rules, whatever the model."""
    for number, rule in enumerate(rules, start=1):
        wrong = _wrong(rule)
        if wrong is not None:
            given, nearest = wrong
            yield Problem(
                given=f"rule {number} of the initial values has {given}",
                rule="a rule has match, a pattern of parameter names, kind, and constants that this kind reads",
                consequence="it is unclear what values the parameters get",
                nearest=nearest,
            )


def _wrong(rule: InitRule) -> tuple[str, str] | None:
    """What is wrong with a rule, and the nearest right thing; None for a good rule."""
    kind = rule.get("kind")
    if not isinstance(rule.get("match"), str):
        return "no match", 'match = "*.weight"'
    if not isinstance(kind, str) or kind not in KINDS:
        return ("no kind" if kind is None else f"kind {kind!r}"), nearest_name(str(kind), KINDS)
    constants = KINDS[kind]
    for key, value in rule.items():
        if key in ("match", "kind"):
            continue
        if key not in constants:
            return (
                f"{key}, which {kind} does not read",
                f"leave it out; {kind} reads {', '.join(constants) or 'nothing'}",
            )
        if key in _CHOICES:
            if value not in _CHOICES[key]:
                return f"{key} {value!r}", nearest_name(str(value), _CHOICES[key])
        elif isinstance(value, str) or abs(value) == float("inf") or value != value:
            return f"{key} {value!r}", "a finite number"
        elif key in _POSITIVE and value <= 0:
            return f"{key} {value:g}", "a number above 0"
    missing = [key for key, default in constants.items() if default is None and key not in rule]
    return (f"no {missing[0]}", f"{missing[0]} = 0.0") if missing else None
