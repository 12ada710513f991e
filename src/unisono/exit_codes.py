"""Exit codes of processes; any other failure is 1. Imports nothing: the first thing that a program does needs one."""

USER_ERROR = 2  # the user must change something
REQUEUE = 75  # preempted with the state saved, or before there was any
FATAL = 76  # the same start would fail again in the same way
