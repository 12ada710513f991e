"""One sample as bytes: a JSON head with the name, dtype and shape of each array, then the arrays, each aligned to 64 bytes."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from unisono.data.dataset import Batch
from unisono.storage.limits import decode_json, num_elements

_ALIGN: Final = 64


def pack_sample(sample: Batch) -> bytes:
    """The bytes of a sample whose entries are arrays."""
    head = json.dumps([[name, array.dtype.str, array.shape] for name, array in sample.items()]).encode()
    parts = [len(head).to_bytes(8, "little"), head]
    end = 8 + len(head)
    for array in sample.values():
        parts += [bytes(-end % _ALIGN), np.ascontiguousarray(array).tobytes()]
        end += -end % _ALIGN + array.nbytes
    return b"".join(parts)


def unpack_sample(raw: memoryview) -> dict[str, Any]:
    """The sample that ``pack_sample`` wrote; its arrays are views of ``raw``."""
    end = 8 + int.from_bytes(raw[:8], "little")
    sample: Batch = {}
    for name, dtype, shape in decode_json(raw[8:end]):
        end += -end % _ALIGN
        count = num_elements(shape)
        sample[name] = np.frombuffer(raw, dtype, count, end).reshape(shape)
        end += sample[name].nbytes
    return sample
