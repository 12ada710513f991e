"""The peak memory of a model with many equal blocks, from traces of the same model with a few of them.

A trace runs the same operations for each block. What is alive at one of them is linear in the number of blocks: it grows by what
a block keeps at that place of the step. So each place of the step is extrapolated by itself, and the peak is the largest of
them: where most is alive may change with the number of blocks. Three traces tell whether a place is linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from unisono.measure.live_storages import Peak, Site
from unisono.parallel.memory_ledger import MemoryLedger
from unisono.plan.plan import Plan
from unisono.train.whole_model import meta_copy

# FSDP2 treats the first and the last blocks differently, of which prefetching makes one more each
# Where the last three are not on a line, one more is traced: with few blocks another place may be the highest.
TRACED_BLOCKS: Final = (3, 4, 5, 6, 7)
_LEAST_BLOCKS: Final = 24  # below, three short traces take about as long as one of all blocks
_TOLERANCE_FRAC: Final = 5e-4  # of the peak, by which a place may deviate from a line at the full number of blocks
_OWN_NAMES: Final = frozenset(("_parameters", "_buffers", "_modules"))


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualBlocks:
    """Neighbouring members of a ``ModuleList`` or ``Sequential`` that differ in their values only.

    Attributes:
        path: Name of the list in the model.
        begin: Number of the first of them in the list.
        count: How many there are.
    """

    path: str
    begin: int
    count: int

    def shortened(self, model: nn.Module, count: int) -> nn.Module:
        """A copy of ``model`` without values, on the meta device, with ``count`` of these blocks."""
        copied = meta_copy(model)
        blocks: Any = copied.get_submodule(self.path)
        del blocks[self.begin + count : self.begin + self.count]
        return copied

    def whole_ledger(self, ledger: MemoryLedger, count: int) -> MemoryLedger:
        """The ledger of the whole model, from that of one with ``count`` of these blocks."""
        prefix, last, more = f"{self.path}.", self.begin + count - 1, self.count - count
        parameters = dict[str, Any]()
        for name, memory in ledger.parameters.items():
            number, _, rest = name.removeprefix(prefix).partition(".")
            if not name.startswith(prefix) or int(number) < last:
                parameters[name] = memory
            elif int(number) > last:
                parameters[f"{prefix}{int(number) + more}.{rest}"] = memory
            else:
                parameters |= {f"{prefix}{last + other}.{rest}": memory for other in range(more + 1)}
        return MemoryLedger(parameters=parameters)


def find_equal_blocks(model: nn.Module, plan: Plan) -> EqualBlocks | None:
    """The longest run of equal blocks; None where too few are equal, or the plan tells blocks apart."""
    if plan.mesh.pp > 1 or _names_numbers(plan):
        return None
    best: EqualBlocks | None = None
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        begin, members = 0, list(module)
        for end in range(1, len(members) + 1):
            if end < len(members) and _are_alike(members[begin], members[end], begin, end):
                continue
            if end - begin >= max(_LEAST_BLOCKS, best.count + 1 if best else 0):
                best = EqualBlocks(path=path, begin=begin, count=end - begin)
            begin = end
    return best


def extrapolated(traces: Sequence[Mapping[Site, Peak]], steps: int) -> Peak | None:
    """The peak with ``steps`` blocks more than the last of three traces, each with a block more than the one before it.

    ``traces`` are the peaks of each place. None where they are not linear.
    """
    first, second, third = _places_of_all(traces)
    lines: list[tuple[int, Peak]] = []  # by how much the place deviates from a line after ``steps``, in bytes
    for site, peak in third.items():
        before, earlier = second[site], first[site]
        bent = abs(peak.bytes - 2 * before.bytes + earlier.bytes) * steps
        kinds = peak.by_kind.keys() | before.by_kind.keys()
        by_kind = {
            kind: (now := peak.by_kind.get(kind, 0)) + (now - before.by_kind.get(kind, 0)) * steps for kind in kinds
        }
        lines.append((bent, replace(peak, bytes=peak.bytes + (peak.bytes - before.bytes) * steps, by_kind=by_kind)))
    highest = max((peak for _, peak in lines), key=lambda peak: peak.bytes)
    allowed = _TOLERANCE_FRAC * highest.bytes
    if any(bent > allowed and peak.bytes + bent > highest.bytes - allowed for bent, peak in lines):
        return None
    return highest if min(highest.by_kind.values()) >= 0 else None


def _places_of_all(traces: Sequence[Mapping[Site, Peak]]) -> list[dict[Site, Peak]]:
    """The places that all traces have. Others differ in the bytes of the result, such as a stack of all norms: these are taken as
    one place for each operation and phase."""
    common = set(traces[0]).intersection(*traces[1:])
    places: list[dict[Site, Peak]] = []
    for trace in traces:
        merged: dict[Site, Peak] = {}
        for site, peak in trace.items():
            key = site if site in common else replace(site, result_bytes=-1)
            if key not in merged or peak.bytes > merged[key].bytes:
                merged[key] = peak
        places.append(merged)
    shared = set(places[0]).intersection(*places[1:])
    return [{site: merged[site] for site in merged if site in shared} for merged in places]


def _names_numbers(plan: Plan) -> bool:
    """Whether the plan may name single blocks: with fewer blocks it would not be the same plan."""
    named = [
        *(rule.module for rule in plan.precision.dtype_rules),
        *plan.recompute.modules,
        *plan.fsdp.ignored_modules,
        *(str(rule) for rule in (*plan.tensor_parallel.rules, *plan.tensor_parallel.placements)),
    ]
    return bool(plan.recompute.blocks_per_stage) or any(letter.isdigit() for name in named for letter in name)


def _are_alike(block: nn.Module, other: nn.Module, number: int, other_number: int) -> bool:
    """Whether two members of a list have equal modules, shapes and attributes; an attribute may be the number in the list."""
    mine, theirs = list(block.named_modules()), list(other.named_modules())
    if [(path, type(module)) for path, module in mine] != [(path, type(module)) for path, module in theirs]:
        return False
    for (_, module), (_, twin) in zip(mine, theirs, strict=True):
        if _shapes(module) != _shapes(twin):
            return False
        values, twins = (
            {name: value for name, value in vars(each).items() if name not in _OWN_NAMES} for each in (module, twin)
        )
        if values.keys() != twins.keys():
            return False
        for name, value in values.items():
            same = value is twins[name] or (value == twins[name]) is True  # arrays and tensors compare to arrays
            if not same and (value, twins[name]) != (number, other_number):
                return False
    return True


def _shapes(module: nn.Module) -> list[Any]:
    tensors = [*module._parameters.items(), *module._buffers.items()]  # pyright: ignore[reportPrivateUsage]  # also those that are None
    return [
        (name, None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad))
        for name, tensor in tensors
    ]
