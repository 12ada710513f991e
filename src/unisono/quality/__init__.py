"""Data before the run: cleaning, duplicates, leaks, splits, labels, columns and classes. Imports no torch."""
