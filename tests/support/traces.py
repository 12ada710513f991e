"""Traces of programs that never ran, with exactly known times, in the format of PyTorch's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from unisono.profile.trace_file import Trace, read_trace


class TraceBuilder:
    """Collects events; times in microseconds."""

    def __init__(self, **meta: Any) -> None:
        self.meta = {"schemaVersion": 1, "baseTimeNanoseconds": 1_000, **meta}
        self.events: list[dict[str, Any]] = []

    def add(
        self, name: str, start: float, duration: float, *, cat: str = "cpu_op", tid: Any = 1, pid: Any = 7, **args: Any
    ):
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": start,
            "dur": duration,
            "args": args,
        }
        self.events.append(event)
        return self

    def op(
        self,
        name: str,
        start: float,
        duration: float,
        *,
        dims: Any = None,
        seq: int = -1,
        backward: bool = False,
        **more: Any,
    ):
        args: dict[str, Any] = {} if dims is None else {"Input Dims": dims}
        if seq >= 0:
            args |= {"Sequence number": seq, "Fwd thread id": int(backward)}
        return self.add(name, start, duration, **more, **args)

    def span(self, name: str, start: float, duration: float, **more: Any):
        return self.add(name, start, duration, cat="user_annotation", **more)

    def step(self, number: int, start: float, duration: float):
        return self.span(f"ProfilerStep#{number}", start, duration)

    def frame(self, name: str, start: float, duration: float, **more: Any):
        return self.add(name, start, duration, cat="python_function", **more)

    def launch(
        self, start: float, correlation: int, kernel: str, kernel_start: float, kernel_duration: float, **args: Any
    ):
        """A call on the host that launches a kernel of device 0."""
        self.add("cudaLaunchKernel", start, 1, cat="cuda_runtime", correlation=correlation)
        args |= {"correlation": correlation, "device": 0, "stream": 20}
        return self.add(kernel, kernel_start, kernel_duration, cat="kernel", pid=0, tid=20, **args)

    def memory(self, at: float, address: int, num_bytes: int, *, total: int = 0, device: int = 0):
        args = {"Addr": address, "Bytes": num_bytes, "Total Allocated": total, "Device Type": device, "Device Id": -1}
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "name": "[memory]",
                "pid": 7,
                "tid": 1,
                "ts": at,
                "s": "t",
                "args": args,
            }
        )
        return self

    def text(self) -> str:
        return json.dumps({**self.meta, "traceEvents": self.events, "traceName": "t"}, indent=1)

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path

    def read(self, folder: Path) -> Trace:
        return read_trace(self.write(folder / "trace.json"))
