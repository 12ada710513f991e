"""Times push and pull for each kind of store, size and codec, next to torch's own all-reduce."""
