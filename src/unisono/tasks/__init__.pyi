from .options import ImageOptions as ImageOptions
from .options import LoraOptions as LoraOptions
from .options import TaskOptions as TaskOptions
from .options import TextOptions as TextOptions
