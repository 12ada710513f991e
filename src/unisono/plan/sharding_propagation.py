"""Propagates sharding through an operation: from the sharding of its inputs to that of its outputs.

A value is sharded along one dim, in equal contiguous parts. ``propagate`` returns the sharded dim of each output, or raises if
ranks cannot compute their parts alone. It has rules for the operations between the layers of a pair (Shoeybi et al. 2019):
elementwise ones, those that move and split dims, attention, and reductions along other dims. The rules are those of GSPMD (Xu
et al. 2021) that need no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from unisono.plan.trace import Operand, TracedOp

FUSED = 3  # matrices side by side in a fused projection: query, key, value

Shape = tuple[int, ...]


class ValueSharding(NamedTuple):
    """A value that is sharded along ``dim`` and depends on the outputs of the layers ``origins``.

    Along ``dim`` there are ``fused`` equal matrices side by side, each of which is sharded. ``single``: the next reshape splits
    off one head. ``doubtful``: some reshape could be read in that way.
    """

    dim: int
    origins: frozenset[str]
    fused: int = 1
    single: bool = False
    doubtful: bool = False


class CannotPropagate(Exception):
    """Ranks cannot compute their parts alone. The text continues the sentence "its result ..." about the layers of origin."""


class NeedsFusedSplit(CannotPropagate):
    """The operation can be propagated only if the value is sharded as ``FUSED`` matrices side by side."""


def propagate(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Sharding of each output of ``op``; ``shardings`` has that of its inputs, at least one. Raises CannotPropagate."""
    name = op.name.strip("_")
    rule = _RULES.get(name)
    if rule is None and name not in _ELEMENTWISE:
        raise CannotPropagate(f"goes through {name}, for which there is no rule")
    inputs = [shardings[operand.value] for operand in op.operands() if operand.value in shardings]
    origins = frozenset[str]().union(*(sharding.origins for sharding in inputs))
    outputs = (rule or _elementwise)(op, shardings)
    doubtful = any(sharding.doubtful for sharding in (*inputs, *outputs) if sharding)
    return [sharding and sharding._replace(origins=origins, doubtful=doubtful) for sharding in outputs]


def _elementwise(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    at, fused = _aligned(op.operands(), shardings)
    return [_at(shape, at, fused) for shape in op.shapes]


def _aligned(operands: Sequence[Operand], shardings: Mapping[int, ValueSharding], last: int = 0) -> tuple[int, int]:
    """The dim, counted from the right, along which all sharded ``operands`` are sharded, and their ``fused``.

    The ``last`` dims must not be sharded, and other operands must have size 1 along that dim.
    """
    sharded = [(operand, shardings[operand.value]) for operand in operands if operand.value in shardings]
    places = {
        (sharding.dim - len(operand.shape), operand.shape[sharding.dim], sharding.fused)
        for operand, sharding in sharded
    }
    at, _, fused = next(iter(places))
    if len(places) > 1:
        raise CannotPropagate("meets another one that is sharded in another way")
    if at >= -last:
        raise CannotPropagate("is summed or compared along the sharded dim")
    for operand in operands:
        if operand.value not in shardings and len(operand.shape) >= -at and operand.shape[at] != 1:
            raise CannotPropagate(
                f"meets {operand.parameter or 'a value'} that is not sharded and has a size above 1 along the sharded dim"
            )
    return at, fused


def _at(shape: Shape, at: int, fused: int) -> ValueSharding:
    return ValueSharding(len(shape) + at, frozenset(), fused)


def _only(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> tuple[Shape, ValueSharding]:
    """Shape and sharding of the first operand, which must be the only sharded one."""
    first, *others = op.operands()
    if first.value not in shardings or any(other.value in shardings for other in others):
        raise CannotPropagate(f"goes into {op.name.strip('_')} together with others")
    return first.shape, shardings[first.value]


def _argument(op: TracedOp, place: int, name: str, default: Any = None) -> Any:
    return op.arguments[place] if len(op.arguments) > place else op.keywords.get(name, default)


def _numbers(op: TracedOp, place: int, *names: str) -> list[int]:
    """Integers from argument ``place`` on, given one by one or as a sequence."""
    rest: Any = op.arguments[place:] or [op.keywords[name] for name in names if name in op.keywords]
    return list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else list(rest)


def _permuted(
    order: Callable[[TracedOp, int], list[int]],
) -> Callable[[TracedOp, Mapping[int, ValueSharding]], list[ValueSharding | None]]:
    def rule(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
        shape, sharding = _only(op, shardings)
        return [sharding._replace(dim=order(op, len(shape)).index(sharding.dim))]

    return rule


def _transposed(op: TracedOp, dims: int) -> list[int]:
    first = _argument(op, 1, "dim0", _argument(op, 1, "axis0"))
    second = _argument(op, 2, "dim1", _argument(op, 2, "axis1"))
    order = list(range(dims))
    order[first], order[second] = order[second], order[first]
    return order


def _moved(op: TracedOp, dims: int) -> list[int]:
    of, to = (
        [n] if isinstance(n, int) else list(n) for n in (_argument(op, 1, "source"), _argument(op, 2, "destination"))
    )
    places = {there % dims: here % dims for here, there in zip(of, to, strict=True)}
    rest = iter([dim for dim in range(dims) if dim not in places.values()])
    return [places[place] if place in places else next(rest) for place in range(dims)]


def _last_two(_op: TracedOp, dims: int) -> list[int]:
    return [*range(dims - 2), dims - 1, dims - 2]


def _reshaped(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Parts stay contiguous if the sizes before the dim, or before its first factor, have the same product."""
    shape, sharding = _only(op, shardings)
    (target,) = op.shapes
    before, size = prod(shape[: sharding.dim]), shape[sharding.dim]
    places = [dim for dim in range(len(target)) if prod(target[:dim]) == before]
    if not places:
        raise CannotPropagate("is reshaped across the sharded dim")
    place = places[-1]
    if len(places) > 1 and size > 1:
        if sharding.single:
            return [sharding._replace(dim=places[0], single=False)]
        sharding = sharding._replace(doubtful=True)
    if sharding.fused > 1 and target[place] != size:
        if target[place] != sharding.fused or place + 1 == len(target):
            raise CannotPropagate("is split unevenly")
        size, place = size // sharding.fused, place + 1
        sharding = sharding._replace(fused=1)
    elif target[place] == FUSED and size % FUSED == 0 and size > FUSED:
        raise NeedsFusedSplit("is split into three")
    if target[place] % size and size % target[place]:
        raise CannotPropagate("is reshaped across the sharded dim")
    return [sharding._replace(dim=place)]


def _expanded(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, sharding = _only(op, shardings)
    return [_at(op.shapes[0], sharding.dim - len(shape), sharding.fused)]


def _repeated(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Each head is repeated in place, so parts stay contiguous."""
    shape, sharding = _only(op, shardings)
    if not isinstance(_argument(op, 1, "repeats"), int) or _argument(op, 2, "dim") is None or sharding.fused > 1:
        raise CannotPropagate("is repeated unevenly")
    return [sharding._replace(dim=sharding.dim % len(shape))]


def _split(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, sharding = _only(op, shardings)
    if _argument(op, 2, "dim", 0) % len(shape) != sharding.dim:
        return [sharding] * len(op.shapes)
    if len({part[sharding.dim] for part in op.shapes}) > 1:
        raise CannotPropagate("is split unevenly")
    if sharding.fused == len(op.shapes):
        return [sharding._replace(fused=1)] * len(op.shapes)
    kind = NeedsFusedSplit if len(op.shapes) == FUSED and sharding.fused == 1 else CannotPropagate
    raise kind(f"is split into {len(op.shapes)}")


def _unbound(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, sharding = _only(op, shardings)
    dim = _argument(op, 1, "dim", 0) % len(shape)
    if dim == sharding.dim:
        raise CannotPropagate("is unbound along the sharded dim")
    return [sharding._replace(dim=sharding.dim - (dim < sharding.dim))] * len(op.shapes)


def _unsqueezed(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, sharding = _only(op, shardings)
    dim = _argument(op, 1, "dim") % (len(shape) + 1)
    return [sharding._replace(dim=sharding.dim + (dim <= sharding.dim))]


def _indexed(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, sharding = _only(op, shardings)
    argument = op.arguments[1]
    index: list[Any] = (
        list(argument) if isinstance(argument, tuple) and not isinstance(argument, Operand) else [argument]
    )
    if any(item is not None and item is not Ellipsis and not isinstance(item, (int, slice)) for item in index):
        raise CannotPropagate("is indexed by a tensor")
    used = sum(isinstance(item, (int, slice)) for item in index)
    place = index.index(Ellipsis) if Ellipsis in index else len(index)
    index[place : place + 1] = [slice(None)] * (len(shape) - used)
    dim, output_dim = 0, 0
    for item in index:
        if item is not None and dim == sharding.dim:
            if item != slice(None):
                raise CannotPropagate("is indexed along the sharded dim")
            return [sharding._replace(dim=output_dim)]
        dim, output_dim = dim + (item is not None), output_dim + (not isinstance(item, int))
    raise CannotPropagate("is indexed in a way that is not understood")


def _joined(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    at, fused = _aligned(op.operands(), shardings)
    dim = _argument(op, 1, "dim", 0)
    if dim % len(op.shapes[0]) == len(op.shapes[0]) + at:
        raise CannotPropagate("is joined with others along the sharded dim")
    return [_at(op.shapes[0], at, fused)]


def _along(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Softmax along a dim that is not sharded."""
    shape, sharding = _only(op, shardings)
    dim = _argument(op, 1, "dim")
    if dim is None or dim % len(shape) == sharding.dim:
        raise CannotPropagate(f"goes through {op.name} along the sharded dim")
    return [sharding]


def _reduced(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, sharding = _only(op, shardings)
    argument = _argument(op, 1, "dim")
    dims = [dim % len(shape) for dim in ([argument] if isinstance(argument, int) else argument or range(len(shape)))]
    if sharding.dim in dims:
        raise CannotPropagate(f"goes through {op.name} along the sharded dim")
    keepdim = len(op.shapes[0]) == len(shape)
    return [sharding._replace(dim=sharding.dim - (0 if keepdim else sum(dim < sharding.dim for dim in dims)))]


def _normalised(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, sharding = _only(op, shardings)
    if sharding.dim >= len(shape) - len(_argument(op, 1, "normalized_shape")):
        raise CannotPropagate(f"goes through {op.name} along the sharded dim")
    return [sharding]


def _multiplied(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Batched matrix products; the batch dims are sharded."""
    at, fused = _aligned(op.operands(), shardings, last=2)
    return [_at(op.shapes[0], at, fused)]


def _attention(op: TracedOp, shardings: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Attention sharded by heads; with ``enable_gqa`` there are fewer heads of keys and values."""
    query, key, value, *masks = op.operands()
    if any(operand.value not in shardings for operand in (query, key, value)):
        raise CannotPropagate("meets queries, keys or values that are not sharded")
    heads, *others = (shardings[operand.value].dim - len(operand.shape) for operand in (query, key, value))
    if set(others) != {heads} or heads >= -2 or (heads != -3 and op.keywords.get("enable_gqa")):
        raise CannotPropagate("goes into attention, but not sharded by heads")
    for mask in masks:
        if mask.value in shardings or (len(mask.shape) >= -heads and mask.shape[heads] != 1):
            raise CannotPropagate("meets a mask for each head")
    return [_at(op.shapes[0], heads, 1)]


_RULES: Mapping[str, Callable[[TracedOp, Mapping[int, ValueSharding]], list[ValueSharding | None]]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _reshaped),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _permuted(_transposed)),
    "permute": _permuted(lambda op, dims: [dim % dims for dim in _numbers(op, 1, "dims")]),
    "movedim": _permuted(_moved),
    "mT": _permuted(_last_two),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    "repeat_interleave": _repeated,
    **dict.fromkeys(("chunk", "split"), _split),
    "unbind": _unbound,
    "unsqueeze": _unsqueezed,
    "getitem": _indexed,
    **dict.fromkeys(("cat", "concat"), _joined),
    **dict.fromkeys(("softmax", "log_softmax"), _along),
    **dict.fromkeys(("mean", "sum", "var", "std", "amax"), _reduced),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalised),
    **dict.fromkeys(("matmul", "rmatmul", "bmm"), _multiplied),
    "scaled_dot_product_attention": _attention,
}

# fmt: off
_ELEMENTWISE = frozenset((
    "add", "sub", "mul", "div", "true_divide", "truediv", "pow", "neg", "exp", "log", "sqrt", "rsqrt", "square",
    "abs", "sin", "cos", "tanh", "sigmoid", "relu", "relu6", "gelu", "silu", "elu", "selu", "celu", "mish",
    "softplus", "softsign", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "clamp", "dropout",
    "masked_fill", "where", "iadd", "isub", "imul", "itruediv", "idiv", "radd", "rsub", "rmul", "rtruediv", "rdiv",
    "rpow", "ipow", "to", "type", "float", "half", "bfloat16", "double", "type_as", "contiguous", "clone", "detach",
))
# fmt: on
