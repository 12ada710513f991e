"""What a plan costs, and which plan fits: memory by tracing the run's own code (``unisono.train.dry_run``), time from shapes."""
