"""Names of the files and folders in a run's folder."""

from typing import Final

RUN_FILE: Final = "config.toml"  # its configuration
PLAN_FILE: Final = "plan.json"
CHECKPOINTS_FOLDER: Final = "checkpoints"
EVENTS_FOLDER: Final = "events"
LOGS_FOLDER: Final = "logs"  # of its ranks, and of servers
MEDIA_FOLDER: Final = "media"  # texts and pictures that the run has logged
PROFILE_FOLDER: Final = "profile"  # of short profiles, a folder for each
LOCK_FILE: Final = "run.lock"  # held by rank 0 while it trains
REPORT_FILE: Final = "report.html"
LAUNCH_FILE: Final = "launch.json"  # how it was launched, and how each attempt ended
