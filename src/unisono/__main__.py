"""The program ``unisono``, also as ``python -m unisono``. It handles stop signals before it imports anything large."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with its code.

    Until a run listens for stop signals itself, they end ``train`` and ``launch`` as preempted: no training state is lost. Any
    other command ends at Ctrl-C as it does later. Python itself and this package take some 40 ms before that, in which signals
    end the process as any other; a rank that our launcher starts has them blocked until then.
    """
    try:
        if sys.argv[1:2] in (["train"], ["launch"]):
            from unisono.dist.early_signals import exit_at_stop_signals  # 2 ms, of which --help has no use

            exit_at_stop_signals()
        from unisono.cli.main import entry

        entry()
    except KeyboardInterrupt:
        from unisono.exit_codes import REQUEUE

        print("unisono: interrupted", file=sys.stderr)
        sys.exit(REQUEUE)


if __name__ == "__main__":
    main()
