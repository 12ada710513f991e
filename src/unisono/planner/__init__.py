"""What a plan will cost, and which plan fits. Traces the run's own code (``unisono.train.dry_run``)."""
