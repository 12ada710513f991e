"""Records to samples to batches. Names are loaded on first use, so that ``unisono.data.options`` needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy import lazily

if TYPE_CHECKING:
    from unisono.data.baseline import bigram_bits_per_byte as bigram_bits_per_byte
    from unisono.data.cache import cached as cached
    from unisono.data.compose import balancing_weights as balancing_weights
    from unisono.data.compose import bucketed as bucketed
    from unisono.data.compose import mapped as mapped
    from unisono.data.compose import mixture as mixture
    from unisono.data.compose import weighted as weighted
    from unisono.data.dataset import Dataset as Dataset
    from unisono.data.dataset import as_dataset as as_dataset
    from unisono.data.dataset import from_map_style as from_map_style
    from unisono.data.loader import Loader as Loader
    from unisono.data.loader import StepBatch as StepBatch
    from unisono.data.loader import eval_batches as eval_batches
    from unisono.data.loader import share as share
    from unisono.data.masking import MaskTokens as MaskTokens
    from unisono.data.options import DataOptions as DataOptions
    from unisono.data.options import LoaderOptions as LoaderOptions
    from unisono.data.order import Order as Order
    from unisono.data.packing import PackedWindows as PackedWindows
    from unisono.data.packing import pack_tokens as pack_tokens
    from unisono.data.prepared import Prepared as Prepared
    from unisono.data.prepared import prepare as prepare
    from unisono.data.text_augment import TextAugment as TextAugment
    from unisono.data.text_augment import TextTransform as TextTransform
    from unisono.data.text_augment import load_synonyms as load_synonyms
    from unisono.data.tokenizer import Tokenizer as Tokenizer
    from unisono.data.tokenizer import check_vocab as check_vocab
    from unisono.data.tokenizer import load_tokenizer as load_tokenizer
    from unisono.data.tokens import TokenSet as TokenSet
    from unisono.data.tokens import TokenWriter as TokenWriter
    from unisono.data.tokens import open_tokens as open_tokens
    from unisono.data.windows import TokenWindows as TokenWindows

_HOMES = {
    "DataOptions": "options",
    "Dataset": "dataset",
    "Loader": "loader",
    "LoaderOptions": "options",
    "MaskTokens": "masking",
    "Order": "order",
    "PackedWindows": "packing",
    "Prepared": "prepared",
    "StepBatch": "loader",
    "TextAugment": "text_augment",
    "TextTransform": "text_augment",
    "TokenSet": "tokens",
    "TokenWindows": "windows",
    "TokenWriter": "tokens",
    "Tokenizer": "tokenizer",
    "as_dataset": "dataset",
    "balancing_weights": "compose",
    "bigram_bits_per_byte": "baseline",
    "bucketed": "compose",
    "cached": "cache",
    "check_vocab": "tokenizer",
    "eval_batches": "loader",
    "from_map_style": "dataset",
    "load_synonyms": "text_augment",
    "load_tokenizer": "tokenizer",
    "mapped": "compose",
    "mixture": "compose",
    "open_tokens": "tokens",
    "pack_tokens": "packing",
    "prepare": "prepared",
    "share": "loader",
    "weighted": "compose",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
