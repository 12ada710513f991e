"""How a cut goes through an operation: of inputs that each rank has a part of, which parts does it make?

A value is cut along one dim, in equal parts side by side. ``follow`` says along which dim the outputs are then cut, or why ranks
could not compute their parts alone. It knows the operations that lie between the layers of a pair (Shoeybi et al. 2019):
elementwise ones, those that move and split dims, attention, and such that work along other dims. The rules are those of
propagation in GSPMD (Xu et al. 2021), without any that would need communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from unisono.plan.trace import Operand, TracedOp

FUSED = 3  # matrices side by side in a fused projection: query, key, value

Shape = tuple[int, ...]


class ValueSharding(NamedTuple):
    """A value of which each rank has a part along ``dim``, computed from what the layers ``origins`` gave.

    With ``fused`` that many equal matrices lie side by side along ``dim``, and each is cut. With ``single`` the next split finds
    one head; ``doubtful`` says that a split was met which may have been meant so.
    """

    dim: int
    origins: frozenset[str]
    fused: int = 1
    single: bool = False
    doubtful: bool = False


class CannotPropagate(Exception):
    """Ranks cannot go on alone; the text says what happens to the result of the layers it comes from."""


class NeedsFusedSplit(CannotPropagate):
    """The same, unless the value were cut as ``FUSED`` matrices side by side."""


def propagate(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """How each output of ``op`` is cut, at least one of whose inputs is in ``cuts``. Raises Lost."""
    name = op.name.strip("_")
    rule = _RULES.get(name)
    if rule is None and name not in _ELEMENTWISE:
        raise CannotPropagate(f"goes through {name}, for which there is no rule")
    found = [each for each in op.operands() if each.value in cuts]
    origins = frozenset[str]().union(*(cuts[each.value].origins for each in found))
    made = (rule or _elementwise)(op, cuts)
    doubtful = any(cuts[each.value].doubtful for each in found) or any(each and each.doubtful for each in made)
    return [each and each._replace(origins=origins, doubtful=doubtful) for each in made]


def _elementwise(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    at, fused = _aligned(op.operands(), cuts)
    return [_at(shape, at, fused) for shape in op.shapes]


def _aligned(operands: Sequence[Operand], cuts: Mapping[int, ValueSharding], last: int = 0) -> tuple[int, int]:
    """Where, counted from the right, all of ``operands`` that are cut are cut; others have nothing there.

    The ``last`` dims may not be cut.
    """
    cut = [(each, cuts[each.value]) for each in operands if each.value in cuts]
    places = {(own.dim - len(each.shape), each.shape[own.dim], own.fused) for each, own in cut}
    at, _, fused = next(iter(places))
    if len(places) > 1:
        raise CannotPropagate("meets another one that is cut in another way")
    if at >= -last:
        raise CannotPropagate("is summed or compared along the dim that is cut")
    for each in operands:
        if each.value not in cuts and len(each.shape) >= -at and each.shape[at] != 1:
            raise CannotPropagate(
                f"meets {each.parameter or 'a value'} that is whole and has a number for each of its parts"
            )
    return at, fused


def _at(shape: Shape, at: int, fused: int) -> ValueSharding:
    return ValueSharding(len(shape) + at, frozenset(), fused)


def _only(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> tuple[Shape, ValueSharding]:
    """The first operand, the only one that is cut."""
    first, *others = op.operands()
    if first.value not in cuts or any(each.value in cuts for each in others):
        raise CannotPropagate(f"goes into {op.name.strip('_')} beside others")
    return first.shape, cuts[first.value]


def _argument(op: TracedOp, place: int, name: str, default: Any = None) -> Any:
    return op.arguments[place] if len(op.arguments) > place else op.keywords.get(name, default)


def _numbers(op: TracedOp, place: int, *names: str) -> list[int]:
    """Integers given one by one or as a sequence, from ``place`` on."""
    rest: Any = op.arguments[place:] or [op.keywords[name] for name in names if name in op.keywords]
    return list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else list(rest)


def _permuted(
    order: Callable[[TracedOp, int], list[int]],
) -> Callable[[TracedOp, Mapping[int, ValueSharding]], list[ValueSharding | None]]:
    def rule(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
        shape, cut = _only(op, cuts)
        return [cut._replace(dim=order(op, len(shape)).index(cut.dim))]

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


def _reshaped(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Parts stay side by side where the dim, or its first factor, keeps what is before it."""
    shape, cut = _only(op, cuts)
    (made,) = op.shapes
    before, size = prod(shape[: cut.dim]), shape[cut.dim]
    places = [dim for dim in range(len(made)) if prod(made[:dim]) == before]
    if not places:
        raise CannotPropagate("is reshaped across the dim that is cut")
    place = places[-1]
    if len(places) > 1 and size > 1:
        if cut.single:
            return [cut._replace(dim=places[0], single=False)]
        cut = cut._replace(doubtful=True)
    if cut.fused > 1 and made[place] != size:
        if made[place] != cut.fused or place + 1 == len(made):
            raise CannotPropagate("is split unevenly")
        size, place = size // cut.fused, place + 1
        cut = cut._replace(fused=1)
    elif made[place] == FUSED and size % FUSED == 0 and size > FUSED:
        raise NeedsFusedSplit("is split into three")
    if made[place] % size and size % made[place]:
        raise CannotPropagate("is reshaped across the dim that is cut")
    return [cut._replace(dim=place)]


def _expanded(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, cut = _only(op, cuts)
    return [_at(op.shapes[0], cut.dim - len(shape), cut.fused)]


def _repeated(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Each head several times, one behind the other: parts stay side by side."""
    shape, cut = _only(op, cuts)
    if not isinstance(_argument(op, 1, "repeats"), int) or _argument(op, 2, "dim") is None or cut.fused > 1:
        raise CannotPropagate("is repeated unevenly")
    return [cut._replace(dim=cut.dim % len(shape))]


def _parted(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """``chunk``, ``split``."""
    shape, cut = _only(op, cuts)
    if _argument(op, 2, "dim", 0) % len(shape) != cut.dim:
        return [cut] * len(op.shapes)
    if len({made[cut.dim] for made in op.shapes}) > 1:
        raise CannotPropagate("is split unevenly")
    if cut.fused == len(op.shapes):
        return [cut._replace(fused=1)] * len(op.shapes)
    kind = NeedsFusedSplit if len(op.shapes) == FUSED and cut.fused == 1 else CannotPropagate
    raise kind(f"is split into {len(op.shapes)}")


def _unbound(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, cut = _only(op, cuts)
    dim = _argument(op, 1, "dim", 0) % len(shape)
    if dim == cut.dim:
        raise CannotPropagate("is taken apart along the dim that is cut")
    return [cut._replace(dim=cut.dim - (dim < cut.dim))] * len(op.shapes)


def _unsqueezed(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, cut = _only(op, cuts)
    dim = _argument(op, 1, "dim") % (len(shape) + 1)
    return [cut._replace(dim=cut.dim + (dim <= cut.dim))]


def _indexed(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, cut = _only(op, cuts)
    given = op.arguments[1]
    index: list[Any] = list(given) if isinstance(given, tuple) and not isinstance(given, Operand) else [given]
    if any(each is not None and each is not Ellipsis and not isinstance(each, (int, slice)) for each in index):
        raise CannotPropagate("is indexed by a tensor")
    used = sum(isinstance(each, (int, slice)) for each in index)
    place = index.index(Ellipsis) if Ellipsis in index else len(index)
    index[place : place + 1] = [slice(None)] * (len(shape) - used)
    dim, made = 0, 0
    for each in index:
        if each is not None and dim == cut.dim:
            if each != slice(None):
                raise CannotPropagate("is indexed along the dim that is cut")
            return [cut._replace(dim=made)]
        dim, made = dim + (each is not None), made + (not isinstance(each, int))
    raise CannotPropagate("is indexed in a way that is not understood")


def _joined(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """``cat`` along another dim."""
    operands = op.operands()
    at, fused = _aligned(operands, cuts)
    dim = _argument(op, 1, "dim", 0)
    if dim % len(op.shapes[0]) == len(op.shapes[0]) + at:
        raise CannotPropagate("is joined with others along the dim that is cut")
    return [_at(op.shapes[0], at, fused)]


def _along(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Softmax: along another dim."""
    shape, cut = _only(op, cuts)
    dim = _argument(op, 1, "dim")
    if dim is None or dim % len(shape) == cut.dim:
        raise CannotPropagate(f"goes through {op.name} along the dim that is cut")
    return [cut]


def _reduced(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, cut = _only(op, cuts)
    given = _argument(op, 1, "dim")
    dims = [each % len(shape) for each in ([given] if isinstance(given, int) else given or range(len(shape)))]
    if cut.dim in dims:
        raise CannotPropagate(f"goes through {op.name} along the dim that is cut")
    kept = len(op.shapes[0]) == len(shape)
    return [cut._replace(dim=cut.dim - (0 if kept else sum(dim < cut.dim for dim in dims)))]


def _normalised(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    shape, cut = _only(op, cuts)
    if cut.dim >= len(shape) - len(_argument(op, 1, "normalized_shape")):
        raise CannotPropagate(f"goes through {op.name} along the dim that is cut")
    return [cut]


def _multiplied(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Matrix products of many matrices of which each rank has some."""
    at, fused = _aligned(op.operands(), cuts, last=2)
    return [_at(op.shapes[0], at, fused)]


def _attention(op: TracedOp, cuts: Mapping[int, ValueSharding]) -> list[ValueSharding | None]:
    """Heads that each rank has some of; with ``enable_gqa`` fewer of keys and values."""
    query, key, value, *masks = op.operands()
    if any(each.value not in cuts for each in (query, key, value)):
        raise CannotPropagate("meets queries, keys or values that are whole")
    of = [cuts[each.value].dim - len(each.shape) for each in (query, key, value)]
    if len(set(of)) > 1 or of[0] >= -2 or (of[0] != -3 and op.keywords.get("enable_gqa")):
        raise CannotPropagate("goes into attention, but not cut by heads")
    for mask in masks:
        if mask.value in cuts or (len(mask.shape) >= -of[0] and mask.shape[of[0]] != 1):
            raise CannotPropagate("meets a mask for each head")
    return [_at(op.shapes[0], of[0], 1)]


_RULES: Mapping[str, Callable[[TracedOp, Mapping[int, ValueSharding]], list[ValueSharding | None]]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _reshaped),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _permuted(_transposed)),
    "permute": _permuted(lambda op, dims: [dim % dims for dim in _numbers(op, 1, "dims")]),
    "movedim": _permuted(_moved),
    "mT": _permuted(_last_two),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    "repeat_interleave": _repeated,
    **dict.fromkeys(("chunk", "split"), _parted),
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
