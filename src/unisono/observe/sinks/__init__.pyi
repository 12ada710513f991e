from .csv_file import CsvSink as CsvSink
from .mlflow_run import MlflowSink as MlflowSink
from .tensorboard_file import TensorBoardSink as TensorBoardSink
from .trackers import Background as Background
from .trackers import Sink as Sink
from .trackers import SinkFactory as SinkFactory
from .trackers import Trackers as Trackers
from .wandb_run import WandbSink as WandbSink
