"""What a parameter server knows and does: chunks and where they lie, updates, clocks, units of work, snapshots. No sockets."""
