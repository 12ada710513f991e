"""How the ranks of a plan are kept in step: who sums gradients, and what is remembered from step to step."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from unisono.dist import World
from unisono.kvstore import GradientSync, KVStore
from unisono.kvstore.dist_sync import BucketedAllReduce
from unisono.kvstore.local import LocalGradients
from unisono.kvstore.periodic import LocalSteps, Rounds
from unisono.parallel.grid import Grid
from unisono.parallel.pieces import Pieces
from unisono.parallel.shard import PlacedGradients
from unisono.parallel.sharded import ShardedGradients
from unisono.plan.plan import Plan
