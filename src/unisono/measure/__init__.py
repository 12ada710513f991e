"""Probes of this machine and the arithmetic of a model: what a device could do, and what a step asks of it."""
