"""Names of the files and folders in a run's folder."""

from typing import Final

RUN_FILE: Final = "config.toml"  # its configuration
PLAN_FILE: Final = "plan.json"
CHECKPOINTS_FOLDER: Final = "checkpoints"
EVENTS_FOLDER: Final = "events"
LOGS_FOLDER: Final = "logs"  # of its ranks, and of servers
LAUNCH_FILE: Final = "launch.json"  # how it was launched, and how each attempt ended
