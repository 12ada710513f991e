"""Applies a plan to a model: device, precision, recompute, compile."""
