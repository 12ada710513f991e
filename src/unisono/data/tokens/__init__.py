"""Tokens: corpora, tokenizers, token shards, windows and packing."""
