"""The program ``unisono``, also as ``python -m unisono``. It handles SIGTERM before it imports anything large."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with its code.

    Ctrl-C ends it as it does later, also before the command line handles it.
    Until a run listens for stop signals itself, SIGTERM ends ``train`` and ``launch`` as preempted: no training state is lost.
    Python itself and this package take some 40 ms before that, in which SIGTERM ends the process as any other; a rank that our
    launcher starts has it blocked until then.
    """
    try:
        if sys.argv[1:2] in (["train"], ["launch"]):
            from unisono.dist.early_sigterm import exit_at_sigterm  # 2 ms, of which --help has no use

            exit_at_sigterm()
        from unisono.cli.main import entry

        entry()
    except KeyboardInterrupt:
        print("unisono: interrupted", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
