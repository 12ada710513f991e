"""A small process that kills the workers when the launcher dies.

It runs alone (``python -I -S reaper.py``) and imports no part of unisono. It reads ``+<group>`` and ``-<group>`` from
standard input as process groups start and end; only the launcher holds the other end. When the launcher dies, the
pipe closes, and every group still listed gets SIGKILL.
"""

import os
import signal
import sys


def main() -> None:
    """Read groups until the pipe closes, then kill those that are left."""
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
