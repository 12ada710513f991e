"""The kinds of stores: local, dist_sync (all-reduce), dist_local (local SGD), dist_async (parameter servers)."""
