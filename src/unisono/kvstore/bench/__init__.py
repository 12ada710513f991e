"""What push and pull take here: of each kind of store, size and codec, beside torch's own all-reduce."""
