"""Precision of single modules as data, part of a strategy file: what differs from ``plan.precision`` and from fp32 parameters."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class DtypeRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Holds for the modules that ``module`` names (patterns as in ``rules``) and all in them; of a module and one in it that are
    both named, the inner one's rule counts there. "" leaves a field as it is.

    ``parameters``: how they are kept. Norms stay in fp32 unless named themselves. Gradients of bf16 parameters pile up, and
    moments are kept, in fp32. ``compute``: the products inside. ``gradients``: how they travel when ranks sum them.
    """

    module: str
    parameters: Literal["", "fp32", "bf16"] = ""
    compute: Literal["", "fp32", "bf16", "fp16"] = ""
    gradients: Literal["", "fp32", "bf16"] = ""
