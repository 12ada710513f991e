from .job import launch_local as launch_local
from .options import LaunchOptions as LaunchOptions
