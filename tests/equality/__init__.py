"""Compare two checkouts of unisono bit by bit: ``python -m tests.equality --before DIR --after DIR``.

Every case runs the command line of each checkout with that checkout's own interpreter (``DIR/.venv/bin/python``); this
package itself never imports unisono.

    __main__   options, comparison, report
    cases      what is run: settings with the option keys of the first release, and commands
    inputs     the files that the cases read
    side       one checkout: its processes, its working folders, its cached results
    forks      runs inside a checkout's interpreter: forks processes that have imported torch already
    results    losses, gradient norms and checkpoint tensors of a finished run, as comparable text
"""
