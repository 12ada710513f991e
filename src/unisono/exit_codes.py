"""Exit codes of processes; any other failure is 1. Imports nothing: the first thing that a program does needs one."""

USER_ERROR = 2  # the user must change something
REQUEUE = 75  # stopped by Ctrl-C or SIGTERM: the same command goes on
FATAL = 76  # the same start would fail again in the same way
