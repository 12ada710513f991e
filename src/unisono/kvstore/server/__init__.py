"""The parameter server: chunks and their placement, updates, clocks, the work queue, snapshots."""
