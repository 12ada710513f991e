"""A small process that outlives a killed launcher just long enough to take the workers along.

It runs alone (``python -I -S guard.py``), imports no part of unisono, and reads its standard input, whose other end only
the launcher holds: ``+<group>`` and ``-<group>`` as process groups start and end. When the launcher dies, however it
dies, the pipe closes, and every group still listed gets SIGKILL, with all that the workers have started in it.
"""

import os
import signal
import sys


def main() -> None:
    """Serves until the pipe closes."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # the group has ended by itself
            continue


if __name__ == "__main__":
    main()
