"""Precision by module (Micikevicius et al. 2018), fp8 layers, and the loss scale of fp16.

The rules of ``precision.dtype_rules`` set, by module, dtypes of parameters, of computation, and of the reduction of gradients.
Parameters are converted before a model is sharded; modules get their compute dtype after that, around the collectives that
sharding adds. The loss reads a head's weight itself, so its precision goes with ``LazyLogits``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # has no public name; it goes through whatever a module takes

from unisono.errors import PlanError, Problem, nearest_name
from unisono.models.loss import LazyLogits
from unisono.optim.groups import is_norm
from unisono.parallel.device import computes_fp8
from unisono.parallel.hooks import wrap_forward
from unisono.plan.plan import Plan
from unisono.plan.rules import DtypeRule, match_modules

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Field = Literal["parameters", "compute", "gradients"]


class _Dtypes(NamedTuple):
    """The dtypes that a plan's rules set: ``parameters`` and ``gradients`` by (module, own name), ``compute`` by module."""

    rules: dict[str, DtypeRule]
    parameters: dict[tuple[str, str], str]
    gradients: dict[tuple[str, str], str]
    compute: dict[str, str]


def _resolve(plan: Plan, modules: Mapping[str, nn.Module]) -> tuple[_Dtypes, list[Problem]]:
    rules, problems = _by_path(plan, modules)
    parameters = _of_parameters(rules, modules, "parameters")
    gradients = _of_parameters(rules, modules, "gradients")
    return _Dtypes(
        rules, parameters, gradients, {p: rule.compute for p, rule in rules.items() if rule.compute}
    ), problems


def check_dtype_rules(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError for dtype rules that name nothing, name one module twice, or act on nothing."""
    modules = dict(model.named_modules())
    dtypes, problems = _resolve(plan, modules)
    rules, parameters, gradients, computes = dtypes
    for rule in dict.fromkeys(rules.values()):
        paths = [path for path, other in rules.items() if other is rule]
        problems += _acts_on_nothing(rule, paths, plan, modules, parameters, gradients, computes)
    for (path, name), dtype in parameters.items():
        if dtype == "bf16" and (around := _around(path, computes, plan.precision.compute)) != "bf16":
            problems.append(
                Problem(
                    given=f"parameters 'bf16' for {path}.{name}, computed in {around}",
                    rule="bf16 parameters are computed in bf16",
                    consequence="every use would convert them to what they could be kept in",
                    nearest="precision='bf16', or compute='bf16' in the same rule",
                )
            )
            break
    problems += _shared_unlike(parameters, modules)
    if "bf16" in parameters.values() and plan.uses_fsdp and plan.fsdp.zero > 1 and plan.batch.accumulation > 1:
        problems.append(
            Problem(
                given=f"parameters 'bf16' with zero {plan.fsdp.zero} and accumulation {plan.batch.accumulation}",
                rule="gradients of micro-batches pile up in fp32; FSDP2 keeps what it has reduced in the parameter's dtype",
                consequence="small ones would be rounded away",
                nearest=f"zero=1, or micro_batch={plan.batch.micro_batch * plan.batch.accumulation}",
            )
        )
    if problems:
        raise PlanError(*problems)


def convert_parameters(model: nn.Module, plan: Plan) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
    """Convert parameters as the rules say, in place. Returns the dtypes that modules compute in, by path, for
    ``set_compute_dtypes``, and those that gradients are reduced in where it is not their own, by parameter name."""
    modules = dict(model.named_modules())
    dtypes, _ = _resolve(plan, modules)
    for (path, name), dtype in dtypes.parameters.items():
        parameter: nn.Parameter = getattr(modules[path], name)
        parameter.data = parameter.data.to(TORCH_DTYPES[dtype])
    reduced = {f"{path}.{name}".lstrip("."): TORCH_DTYPES[dtype] for (path, name), dtype in dtypes.gradients.items()}
    return {path: TORCH_DTYPES[dtype] for path, dtype in dtypes.compute.items()}, reduced


def set_compute_dtypes(model: nn.Module, computes: Mapping[str, torch.dtype], device_type: str) -> None:
    """Have modules compute in the precision that ``convert`` returned for their paths, in place."""
    modules = dict(model.named_modules())
    for path, dtype in computes.items():
        _compute_in(modules[path], dtype, device_type)
    heads = {modules[path]: dtype for path, dtype in computes.items() if hasattr(modules[path], "weight")}

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, LazyLogits):
            for owner, dtype in heads.items():
                if output.weight is owner.weight:
                    return output._replace(compute=dtype)
        return output

    if heads:
        model.register_forward_hook(hook)


def _compute_in(module: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    def in_dtype(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if dtype == torch.float32:  # autocast would have converted for its own products only
            args, kwargs = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
        alone = not torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, dtype=dtype, enabled=dtype != torch.float32):
            outputs = forward(*args, **kwargs)
        # fp32 layers around it do not take less; autocast around it does
        return pytree.tree_map_only(Tensor, _widened, outputs) if alone else outputs

    wrap_forward(module, in_dtype)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _by_path(plan: Plan, modules: Mapping[str, nn.Module]) -> tuple[dict[str, DtypeRule], list[Problem]]:
    """The rule of each named module, outer modules first."""
    rules: dict[str, DtypeRule] = {}
    problems: list[Problem] = []
    paths = [path for path in modules if path]
    kinds = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path in paths}
    for rule in plan.precision.dtype_rules:
        named = match_modules(rule.module, paths)
        if not named:
            problems.append(
                Problem(
                    given=f"a dtype rule for {rule.module!r}",
                    rule="a rule names modules of the model",
                    consequence="it would change nothing",
                    nearest=nearest_name(rule.module, kinds),
                )
            )
        for path in named:
            if path in rules:
                problems.append(
                    Problem(
                        given=f"{path}, which is named by dtype rules for {rules[path].module!r} and {rule.module!r}",
                        rule="a module is named by one rule; inside it other modules may be",
                        consequence="it would be unclear which of the two counts",
                        nearest="patterns that do not overlap",
                    )
                )
            rules[path] = rule
    return dict(sorted(rules.items(), key=lambda item: item[0].count("."))), problems


def _of_parameters(
    rules: Mapping[str, DtypeRule], modules: Mapping[str, nn.Module], field: Field
) -> dict[tuple[str, str], str]:
    """(module, name of its own parameter) → what the innermost rule that says anything of ``field`` says."""
    values: dict[tuple[str, str], str] = {}
    for path, rule in rules.items():
        value: str = getattr(rule, field)
        for inner, module in modules.items() if value else ():
            within = inner == path or inner.startswith(path + ".")
            if not within or (field == "parameters" and is_norm(module) and inner != path):
                continue
            values |= {(inner, name): value for name, p in module.named_parameters(recurse=False) if _floats(p)}
    return values


def _floats(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point()


def _around(path: str, computes: Mapping[str, str], precision: str) -> str:
    """What a module computes in: its own rule's, or that of the nearest module around it, or the plan's."""
    while path:
        if path in computes:
            return computes[path]
        path = path.rpartition(".")[0]
    return "bf16" if precision == "fp8" else precision


def _acts_on_nothing(
    rule: DtypeRule,
    paths: list[str],
    plan: Plan,
    modules: Mapping[str, nn.Module],
    parameters: Mapping[tuple[str, str], str],
    gradients: Mapping[tuple[str, str], str],
    computes: Mapping[str, str],
) -> Iterator[Problem]:
    def inert(given: str, why: str) -> Problem:
        return Problem(
            given=f"a dtype rule for {rule.module!r} with {given}",
            rule=why,
            consequence="it would change nothing",
            nearest="leave it out",
        )

    if not (rule.parameters or rule.compute or rule.gradients):
        yield inert("nothing else", "it says parameters, compute or gradients")

    def inside(of: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
        return {
            key: value for key, value in of.items() if any(key[0] == p or key[0].startswith(p + ".") for p in paths)
        }

    mine, names = inside(parameters), [path for path in paths if path in computes]
    outer = any(rule.parameters != other.parameters for other in plan.precision.dtype_rules if other.parameters)
    if (
        rule.parameters
        and not outer
        and all(_own(modules, key).dtype == TORCH_DTYPES[value] for key, value in mine.items())
    ):
        yield inert(f"parameters {rule.parameters!r}", "parameters are in fp32, norms unless they are named themselves")
    if rule.compute and all(
        _around(path.rpartition(".")[0], computes, plan.precision.compute) == rule.compute for path in names
    ):
        yield inert(f"compute {rule.compute!r}", f"what is around it computes in {rule.compute} already")
    ranks = plan.mesh.dp_replicate * plan.mesh.shard_degree
    if rule.gradients and ranks == 1:
        yield inert(f"gradients {rule.gradients!r}", "gradients travel between ranks that compute different samples")
    elif rule.gradients == "fp32" and not any(value != "fp32" for value in gradients.values()):
        yield inert("gradients 'fp32'", "gradients travel in fp32, unless a rule around it says otherwise")


def _shared_unlike(dtypes: Mapping[tuple[str, str], str], modules: Mapping[str, nn.Module]) -> Iterator[Problem]:
    said: dict[nn.Parameter, tuple[str, str]] = {}
    for key, value in dtypes.items():
        first = said.setdefault(_own(modules, key), key)
        if dtypes[first] != value:
            yield Problem(
                given=f"parameters {dtypes[first]!r} for {'.'.join(first)} and {value!r} for {'.'.join(key)}",
                rule="they are one parameter",
                consequence="it would be unclear which of the two counts",
                nearest="one of the two rules",
            )


def _own(modules: Mapping[str, nn.Module], key: tuple[str, str]) -> nn.Parameter:
    return getattr(modules[key[0]], key[1])


# --- fp8 ---------------------------------------------------------------------------------------------------------------

MULTIPLE = 16  # rows and columns that the products want


# Products in fp8 are torchao's (Micikevicius et al. 2022, FP8 formats for deep learning): weights and their gradients keep their
# dtype, a layer scales and rounds the operands of its three products. All other layers compute in bf16.


def check_fp8(plan: Plan, blocks: Sequence[nn.Module]) -> None:
    """Raises PlanError where the device or the package lacks, and where no linear layer of ``blocks`` fits."""
    lacking = [] if computes_fp8(plan.mesh.device) else [f"a {plan.mesh.device} without fp8 products"]
    lacking += [] if find_spec("torchao") else ["no torchao"]
    if lacking:
        raise PlanError(
            given=f"precision 'fp8' on {' and '.join(lacking)}",
            rule="fp8 products need torchao (the extra unisono[quant]) and a device with them (compute capability 8.9 up)",
            consequence="nothing was started",
            nearest="plan.precision='bf16'",
        )
    if not any(fits(layer) for block in blocks for layer in block.modules()):
        raise PlanError(
            given=f"precision 'fp8' for {len(blocks)} repeated blocks",
            rule=f"it acts on linear layers in them whose sizes are multiples of {MULTIPLE}",
            consequence="it would change nothing",
            nearest="plan.precision='bf16', or other sizes",
        )


def apply_fp8(blocks: Sequence[nn.Module]) -> None:
    """Have the linear layers of ``blocks`` compute in fp8, in place; before they are sharded or wrapped."""
    from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]

    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=lambda layer, _path: fits(layer))


def fits(layer: nn.Module) -> bool:
    """Whether a layer's products can be made in fp8."""
    return type(layer) is nn.Linear and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)


# --- loss scale ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Dynamic loss scale, on the device: ``scale`` [] and ``clean_steps`` [] are updated in place.

    After an overflow the scale is divided by ``factor``, never below ``floor``; after ``window`` clean steps in a row it is
    multiplied, never above ``cap``. The overflow flag comes from globally reduced gradients, so all ranks change alike.
    """

    scale: Tensor
    clean_steps: Tensor
    dynamic: bool
    factor: float = 2.0
    window: int = 2000
    floor: float = 1.0
    cap: float = 2.0**24

    @staticmethod
    def create(device: torch.device, *, initial: float) -> LossScale:
        """A dynamic scale starting at ``initial``."""
        return LossScale(
            scale=torch.tensor(initial, device=device),
            clean_steps=torch.zeros((), dtype=torch.int64, device=device),
            dynamic=True,
        )

    @staticmethod
    def off(device: torch.device) -> LossScale:
        """The fixed scale 1."""
        return LossScale(
            scale=torch.ones((), device=device),
            clean_steps=torch.zeros((), dtype=torch.int64, device=device),
            dynamic=False,
        )

    def update(self, overflow: Tensor) -> None:
        """One step's rule; ``overflow`` is a 0-dim bool on the device. No host synchronisation."""
        if not self.dynamic:
            return
        clean = torch.where(overflow, 0, self.clean_steps + 1)
        grow = clean >= self.window
        grown = (self.scale * self.factor).clamp(max=self.cap)
        shrunk = (self.scale / self.factor).clamp(min=self.floor)
        self.scale.copy_(torch.where(overflow, shrunk, torch.where(grow, grown, self.scale)))
        self.clean_steps.copy_(torch.where(grow, 0, clean))

    def state(self) -> dict[str, Tensor]:
        """Named tensors of the mutable state."""
        return {"scaler/scale": self.scale, "scaler/clean_steps": self.clean_steps}
