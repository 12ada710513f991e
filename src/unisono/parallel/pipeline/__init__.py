"""Pipeline parallelism: stages, partition and executor."""
