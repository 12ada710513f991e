from .check import Check as Check
from .examine import examine as examine
