"""Backends of the key-value store, one for each kind."""
