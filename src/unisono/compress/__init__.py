"""Smaller models from trained ones: what they cost before and after, and the run folder that holds the result."""
