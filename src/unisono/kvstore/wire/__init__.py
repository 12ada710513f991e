"""Frames over TCP between processes that have proved to each other that they hold the job's secret; every size is
checked first."""
