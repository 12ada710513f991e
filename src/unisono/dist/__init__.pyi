from .agreement import agree as agree
from .failure import Failure as Failure, read_failure as read_failure, record_failure as record_failure
from .fault_injection import fault_point as fault_point
from .jobspec import JobSpec as JobSpec, job_from_environ as job_from_environ
from .stop_notice import StopNotice as StopNotice
from .world import World as World, join_world as join_world
