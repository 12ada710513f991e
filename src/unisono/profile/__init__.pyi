from .merge import merge_traces as merge_traces
from .rank_profile import RankProfile as RankProfile
from .rank_profile import newest_profiles as newest_profiles
from .rank_profile import read_profile as read_profile
from .rank_profile import read_profiles as read_profiles
from .summary import summarise_trace as summarise_trace
from .trace_file import read_trace as read_trace
