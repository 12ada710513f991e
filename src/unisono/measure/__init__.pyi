from .ceiling import PeakFlops as PeakFlops
from .ceiling import datasheet_peak as datasheet_peak
from .ceiling import measured_ceiling as measured_ceiling
from .ceiling import peak_flops as peak_flops
from .flops import matmul_params as matmul_params
from .flops import transformer_flops_per_token as transformer_flops_per_token
from .flops import utilization as utilization
