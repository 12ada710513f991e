"""The tracker ``tensorboard``: event files that TensorBoard reads, written with the ``tensorboard`` package alone."""

from __future__ import annotations

import importlib
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from unisono.observe.events import Event, RewindFilter
from unisono.observe.tracked import TRACKED, event_metrics, event_text, histogram_bins, payload, run_settings
from unisono.storage.directory import make_folder
from unisono.storage.files import open_new

_ENDED: Final = ("finished", "early_stop", "left")  # reasons of run_end after which a session is a success


class TensorBoardSink:
    """Writes scalars, histograms, texts, pictures and the settings (HPARAMS) of a run, one event file per attempt.

    After a restart, ``SessionLog.START`` at the first repeated step makes readers drop the earlier attempt's values from there
    on. Costs about 0.3 ms per step event, mostly for the checksum. The settings and the end of the run are summaries of the run
    itself, as the HPARAMS tab reads them; readers keep those of the first attempt that wrote them.
    """

    name = "tensorboard"

    def __init__(self, run_dir: Path) -> None:
        folder = run_dir / "tensorboard"
        make_folder(folder)
        records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors: Any = importlib.import_module("tensorboard.util.tensor_util")
        self._hparams: Any = importlib.import_module("tensorboard.plugins.hparams.metadata")
        self._plugin_data: Any = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
        self._run_dir = run_dir
        self._earlier = sorted(folder.glob("events.out.tfevents.*"))
        self._continues = bool(self._earlier)
        self._rewind = RewindFilter()
        self._has_settings = False
        self._resumed_step = -1  # an earlier attempt may have written values of this step
        self._resumed_tags: set[str] | None = None  # those that have one
        path = folder / f"events.out.tfevents.{_later_second(self._earlier):010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = records.RecordWriter(open_new(path))
        self._put(self._events.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, event: Event) -> None:
        back_to = self._rewind.see(event)
        if back_to is not None and self._continues:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._put(self._events.Event(wall_time=event["t"], step=back_to, session_log=start))
        if event["kind"] == "resumed":
            self._resumed_step, self._resumed_tags = event["step"], None
        if event["kind"] == "run_end":
            if event.get("reason") in _ENDED:
                self._put_end(event["t"])
            return
        values = list(self._values(event))
        if not values:
            return
        if not self._has_settings:
            self._has_settings = True
            self._put_settings(event)
        if event["step"] <= self._resumed_step:
            values = self._without_known(values, event["step"])
        summary = self._summaries.Summary(value=values)
        self._put(self._events.Event(wall_time=event["t"], step=event["step"], summary=summary))
        self._continues = True

    def close(self) -> None:
        self._writer.close()

    def _values(self, event: Event) -> Iterator[Any]:
        kind, value = event["kind"], self._summaries.Summary.Value
        if kind in TRACKED:
            for tag, metric in event_metrics(event).items():
                yield value(tag=tag, simple_value=metric)
        elif kind == "histograms":
            for group in ("gradients", "parameters"):
                for name, histogram in event[group].items():
                    if (proto := self._histogram(histogram)) is not None:
                        yield value(tag=f"{group}/{name}", histo=proto)
        elif kind == "log_image":
            image = self._summaries.Summary.Image(
                height=event["height"],
                width=event["width"],
                colorspace=event["channels"],
                encoded_image_string=payload(event, self._run_dir),
            )
            yield value(tag=event["name"], image=image)
        elif (text := event_text(event, self._run_dir)) is not None:
            tensor = self._tensors.make_tensor_proto([text[1].encode()])
            plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
            yield value(tag=text[0], tensor=tensor, metadata=self._summaries.SummaryMetadata(plugin_data=plugin))

    def _histogram(self, histogram: Mapping[str, Any]) -> Any:
        edges, counts = histogram_bins(histogram)
        if not counts:
            return None
        return self._summaries.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=histogram["sum"],
            sum_squares=histogram["sum_squares"],
            bucket_limit=edges[1:],
            bucket=counts,
        )

    def _put_settings(self, event: Event) -> None:
        """Write the settings of ``config.toml``, which is there when the first step has been made."""
        start = self._plugin_data.SessionStartInfo(group_name=str(event.get("run", "")), start_time_secs=event["t"])
        for name, value in run_settings(self._run_dir).items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                start.hparams[name].number_value = value
            else:
                start.hparams[name].string_value = value
        data = self._plugin_data.HParamsPluginData(session_start_info=start)
        self._put_hparams(event["t"], self._hparams.SESSION_START_INFO_TAG, data)

    def _put_end(self, at: float) -> None:
        success = importlib.import_module("tensorboard.plugins.hparams.api_pb2").Status.Value("STATUS_SUCCESS")
        end = self._plugin_data.SessionEndInfo(status=success, end_time_secs=at)
        data = self._plugin_data.HParamsPluginData(session_end_info=end)
        self._put_hparams(at, self._hparams.SESSION_END_INFO_TAG, data)

    def _put_hparams(self, wall_time: float, tag: str, data: Any) -> None:
        metadata = self._hparams.create_summary_metadata(data)
        value = self._summaries.Summary.Value(tag=tag, tensor=self._hparams.NULL_TENSOR, metadata=metadata)
        summary = self._summaries.Summary(value=[value])
        self._put(self._events.Event(wall_time=wall_time, step=0, summary=summary))

    def _without_known(self, values: Sequence[Any], step: int) -> list[Any]:
        """Those of ``values``, of the step that the run resumed from, whose tags the earlier files have at no such step."""
        if self._resumed_tags is None:
            self._resumed_tags = self._tags_at(step)
        kept = [value for value in values if value.tag not in self._resumed_tags]
        self._resumed_tags.update(value.tag for value in kept)
        return kept

    def _tags_at(self, step: int) -> set[str]:
        """Tags of the values at ``step`` that a reader finds in the earlier files."""
        loader: Any = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
        tags: set[str] = set()
        for path in self._earlier:
            for record in loader.LegacyEventFileLoader(str(path)).Load():
                if record.HasField("session_log") and record.step <= step:
                    tags.clear()
                elif record.step == step and record.HasField("summary"):
                    tags.update(value.tag for value in record.summary.value)
        return tags

    def _put(self, record: Any) -> None:
        self._writer.write(record.SerializeToString())
        self._writer.flush()  # a full disk must raise here, not at exit


def _later_second(earlier: Sequence[Path]) -> int:
    """A second after those of earlier files: readers sort files by the second in their name, also after a quick restart."""
    seconds = [int(match.group(1)) for path in earlier if (match := re.search(r"tfevents\.(\d+)\.", path.name))]
    return max([int(time.time()), *(second + 1 for second in seconds)])
