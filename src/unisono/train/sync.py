"""How the ranks of a plan are kept in step: who sums gradients, and what is remembered from step to step."""

from __future__ import annotations
