"""Settings of the data: which text, cut how, in which order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.config import option

Boundaries = Literal["mask", "ignore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """What a run reads. Seed, batch sizes and number of steps belong to other sections."""

    corpus: str = option("stdlib", "stdlib = the running Python's own library source; or a folder or file of text.")
    tokenizer: str = option("bytes", "bytes = one token per UTF-8 byte; or the path of a Hugging Face tokenizer.json.")
    seq_len: int = option(256, "Tokens of one sample.", ge=2)
    eval_frac: float = option(0.05, "Share of the files held out, chosen by hash of their path.", gt=0.0, le=0.5)
    boundaries: Literal["mask", "ignore"] = option(
        "mask", "Several documents in one sample: mask = never predict or attend across them; ignore = one stream."
    )
    prefetch_depth: int = option(2, "Steps of data made ready ahead in the background; 0 = none.", ge=0)
    cache_dir: str = option("", "Where prepared data is kept; empty = unisono/ in the user's cache folder.")


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """``unisono`` in the user's cache folder: ``$XDG_CACHE_HOME``, else ``~/.cache``."""
    root = environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "unisono"
