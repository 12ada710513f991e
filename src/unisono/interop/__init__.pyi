from .bert import load_bert as load_bert
from .huggingface import export as export
