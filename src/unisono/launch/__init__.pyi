from .hostfile import Host as Host
from .hostfile import read_hostfile as read_hostfile
from .job import launch_local as launch_local
from .job import run_job as run_job
from .options import LaunchOptions as LaunchOptions
from .process_layout import JobLayout as JobLayout
from .process_layout import assign_processes as assign_processes
