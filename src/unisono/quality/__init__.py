"""Data before the run: duplicates, leaks between splits. Works on tables and folders of text; imports no torch."""
