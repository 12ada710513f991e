"""What a run says about itself: events, meters, console, trackers, report.

The per-rank JSONL of ``events`` is the truth; everything else is a view of it. Import the modules directly: ``events``
and ``clean`` stand low in the import order and need the standard library only, the rest may know the rooms below it.
"""
