from .finding import Finding as Finding
from .finding import Rule as Rule
from .overlay import write_overlay as write_overlay
from .rules import diagnose as diagnose
from .run_facts import RankFacts as RankFacts
from .run_facts import RunFacts as RunFacts
from .run_facts import SkippedStep as SkippedStep
from .run_facts import read_run as read_run
