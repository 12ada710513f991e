"""Keeps workers in step. ``create(kind, world)`` gives a store; its gradient synchronisation is the trainer's seam."""

from unisono.kvstore.periodic import LocalSteps as LocalSteps
from unisono.kvstore.periodic import Rounds as Rounds
from unisono.kvstore.store import GradientSync as GradientSync
from unisono.kvstore.store import KVStore as KVStore
from unisono.kvstore.store import create as create
