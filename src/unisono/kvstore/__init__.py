"""Keeps workers in step. ``create(kind, world)`` gives a store; its gradient synchronisation is the trainer's seam."""

from unisono.kvstore.backends.local_sgd import LocalSGD as LocalSGD
from unisono.kvstore.backends.local_sgd import LocalSGDConfig as LocalSGDConfig
from unisono.kvstore.store import GradientSync as GradientSync
from unisono.kvstore.store import KVStore as KVStore
from unisono.kvstore.store import create_kvstore as create_kvstore
