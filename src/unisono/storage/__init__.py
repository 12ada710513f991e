"""Durable files and directories: complete or absent, also after a crash. No torch, no network."""
