"""Counts of torch.compile. The only place that reads torch._dynamo's counters, which are private: torch 2.11 to 2.13."""

from __future__ import annotations

import sys
from typing import Any

from unisono.profile.rank_profile import CompileCounts


def compile_counts() -> CompileCounts:
    """Compilations and breaks of graphs so far; none where nothing was compiled, and -1 breaks where torch does not tell."""
    module: Any = sys.modules.get(
        "torch._dynamo.utils"
    )  # importing it takes seconds, and nothing was compiled without it
    if module is None:
        return CompileCounts(graph_breaks=0)
    try:
        counters = module.counters
        return CompileCounts(
            compilations=int(counters["frames"]["ok"]), graph_breaks=int(sum(counters["graph_break"].values()))
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return CompileCounts()


def compiled_since(earlier: CompileCounts) -> CompileCounts:
    """The counts since ``earlier``."""
    now = compile_counts()
    breaks = -1 if min(now.graph_breaks, earlier.graph_breaks) < 0 else now.graph_breaks - earlier.graph_breaks
    return CompileCounts(compilations=max(0, now.compilations - earlier.compilations), graph_breaks=breaks)
