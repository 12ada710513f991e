"""Precision by module (Micikevicius et al. 2018), and fp8 layers.

The rules of ``precision.dtype_rules`` set, by module, the dtypes of parameters, of matrix products, and of gradient reduction.
Parameters are converted before a model is sharded. Compute dtypes are set after that, around the collectives that sharding adds.
The loss multiplies with the output matrix itself, so ``LazyLogits`` carries its compute dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # has no public name

from unisono.errors import PlanError, Problem, nearest_name
from unisono.optim.groups import is_norm
from unisono.parallel.device import computes_fp8
from unisono.parallel.hooks import replace_in_logits, wrap_forward
from unisono.plan.plan import Plan
from unisono.plan.rules import DtypeRule, match_modules

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Field = Literal["parameters", "compute", "gradients"]


class _Dtypes(NamedTuple):
    """The dtypes that a plan's rules set: ``parameters`` and ``gradients`` by (module, own name), ``compute`` by module.

    ``default`` is the compute dtype of the plan; ``rules`` has the rule of each matched module, outer modules first.
    """

    default: str
    modules: dict[str, nn.Module]
    rules: dict[str, DtypeRule]
    parameters: dict[tuple[str, str], str]
    gradients: dict[tuple[str, str], str]
    compute: dict[str, str]

    def compute_at(self, path: str) -> str:
        """The compute dtype at ``path``: of its own rule, else of the nearest module around it with one, else of the plan."""
        while path:
            if path in self.compute:
                return self.compute[path]
            path = path.rpartition(".")[0]
        return "bf16" if self.default == "fp8" else self.default

    def parameter(self, key: tuple[str, str]) -> nn.Parameter:
        """The parameter of (module, own name)."""
        return getattr(self.modules[key[0]], key[1])


def _resolve(plan: Plan, model: nn.Module) -> tuple[_Dtypes, list[Problem]]:
    modules = dict(model.named_modules())
    rules, problems = _rules_by_path(plan, modules)
    return _Dtypes(
        default=plan.precision.compute,
        modules=modules,
        rules=rules,
        parameters=_dtypes_of_parameters(rules, modules, "parameters"),
        gradients=_dtypes_of_parameters(rules, modules, "gradients"),
        compute={path: rule.compute for path, rule in rules.items() if rule.compute},
    ), problems


def check_dtype_rules(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError for dtype rules that match no module, match one module twice, or have no effect."""
    dtypes, problems = _resolve(plan, model)
    for rule in dict.fromkeys(dtypes.rules.values()):
        problems += _without_effect(rule, plan, dtypes)
    for (path, name), dtype in dtypes.parameters.items():
        if dtype == "bf16" and (around := dtypes.compute_at(path)) != "bf16":
            problems.append(
                Problem(
                    given=f"parameters 'bf16' for {path}.{name}, computed in {around}",
                    rule="bf16 parameters are computed in bf16",
                    consequence="every use would convert them to what they could be kept in",
                    nearest="precision='bf16', or compute='bf16' in the same rule",
                )
            )
            break
    problems += _shared_unlike(dtypes)
    if "bf16" in dtypes.parameters.values() and plan.uses_fsdp and plan.fsdp.zero > 1 and plan.batch.accumulation > 1:
        problems.append(
            Problem(
                given=f"parameters 'bf16' with zero {plan.fsdp.zero} and accumulation {plan.batch.accumulation}",
                rule="gradients of micro-batches accumulate in fp32; FSDP2 keeps reduced gradients in the parameter's dtype",
                consequence="small ones would be rounded away",
                nearest=f"zero=1, or micro_batch={plan.batch.micro_batch * plan.batch.accumulation}",
            )
        )
    if problems:
        raise PlanError(*problems)


def convert_parameters(model: nn.Module, plan: Plan) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
    """Convert parameters to the dtypes of the rules, in place.

    Returns:
        Compute dtypes by module path, for ``set_compute_dtypes``, and the dtypes in which gradients are reduced, by parameter
        name, where a rule sets them.
    """
    dtypes, _ = _resolve(plan, model)
    for key, dtype in dtypes.parameters.items():
        parameter = dtypes.parameter(key)
        parameter.data = parameter.data.to(TORCH_DTYPES[dtype])
    reduced = {f"{path}.{name}".lstrip("."): TORCH_DTYPES[dtype] for (path, name), dtype in dtypes.gradients.items()}
    return {path: TORCH_DTYPES[dtype] for path, dtype in dtypes.compute.items()}, reduced


def set_compute_dtypes(model: nn.Module, computes: Mapping[str, torch.dtype], device_type: str) -> None:
    """Let modules compute in the dtypes that ``convert_parameters`` returned for their paths, in place."""
    modules = {model.get_submodule(path): dtype for path, dtype in computes.items()}
    for module, dtype in modules.items():
        _compute_in(module, dtype, device_type)
    heads = {module: dtype for module, dtype in modules.items() if hasattr(module, "weight")}
    replace_in_logits(model, "compute", heads)


def _compute_in(module: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    def in_dtype(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if dtype == torch.float32:  # autocast would convert for its own matrix products only
            args, kwargs = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
        alone = not torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, dtype=dtype, enabled=dtype != torch.float32):
            outputs = forward(*args, **kwargs)
        # layers around it in fp32 need fp32 inputs; under autocast they do not
        return pytree.tree_map_only(Tensor, _widened, outputs) if alone else outputs

    wrap_forward(module, in_dtype)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _rules_by_path(plan: Plan, modules: Mapping[str, nn.Module]) -> tuple[dict[str, DtypeRule], list[Problem]]:
    """The rule of each matched module, outer modules first, and problems of patterns."""
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


def _dtypes_of_parameters(
    rules: Mapping[str, DtypeRule], modules: Mapping[str, nn.Module], field: Field
) -> dict[tuple[str, str], str]:
    """(module, name of its own parameter) → dtype of ``field`` in the innermost rule that sets it."""
    values: dict[tuple[str, str], str] = {}
    for path, rule in rules.items():
        value: str = getattr(rule, field)
        for inner, module in modules.items() if value else ():
            within = inner == path or inner.startswith(path + ".")
            if not within or (field == "parameters" and is_norm(module) and inner != path):
                continue
            parameters = module.named_parameters(recurse=False)
            values |= {(inner, name): value for name, parameter in parameters if parameter.is_floating_point()}
    return values


def _without_effect(rule: DtypeRule, plan: Plan, dtypes: _Dtypes) -> Iterator[Problem]:
    def inert(given: str, why: str) -> Problem:
        return Problem(
            given=f"a dtype rule for {rule.module!r} with {given}",
            rule=why,
            consequence="it would change nothing",
            nearest="leave it out",
        )

    if not (rule.parameters or rule.compute or rule.gradients):
        yield inert("nothing else", "it says parameters, compute or gradients")
    paths = [path for path, other in dtypes.rules.items() if other is rule]
    inside = [key for key in dtypes.parameters if any(f"{key[0]}.".startswith(f"{path}.") for path in paths)]
    others = {other.parameters for other in plan.precision.dtype_rules if other.parameters}
    if (
        rule.parameters
        and others <= {rule.parameters}
        and all(dtypes.parameter(key).dtype == TORCH_DTYPES[dtypes.parameters[key]] for key in inside)
    ):
        yield inert(f"parameters {rule.parameters!r}", "parameters are in fp32, norms unless they are named themselves")
    if rule.compute and all(dtypes.compute_at(path.rpartition(".")[0]) == rule.compute for path in paths):
        yield inert(f"compute {rule.compute!r}", f"what is around it computes in {rule.compute} already")
    ranks = plan.mesh.dp_replicate * plan.mesh.shard_degree
    if rule.gradients and ranks == 1:
        yield inert(f"gradients {rule.gradients!r}", "gradients are sent between ranks that compute different samples")
    elif rule.gradients == "fp32" and set(dtypes.gradients.values()) <= {"fp32"}:
        yield inert("gradients 'fp32'", "gradients are sent in fp32, unless a rule around it says otherwise")


def _shared_unlike(dtypes: _Dtypes) -> Iterator[Problem]:
    """Problems of shared parameters that two rules give different dtypes."""
    first_keys: dict[nn.Parameter, tuple[str, str]] = {}
    for key, dtype in dtypes.parameters.items():
        first = first_keys.setdefault(dtypes.parameter(key), key)
        if dtypes.parameters[first] != dtype:
            yield Problem(
                given=f"parameters {dtypes.parameters[first]!r} for {'.'.join(first)} and {dtype!r} for {'.'.join(key)}",
                rule="they are one parameter",
                consequence="it would be unclear which of the two counts",
                nearest="one of the two rules",
            )


# --- fp8 ---------------------------------------------------------------------------------------------------------------

# Matrix products in fp8 are torchao's (Micikevicius et al. 2022, FP8 formats for deep learning): weights and their gradients keep
# their dtype; a layer scales and rounds the operands of its three products. All other layers compute in bf16.

MULTIPLE = 16  # of rows and columns, which the kernels require


def check_fp8(plan: Plan, blocks: Sequence[nn.Module]) -> None:
    """Raises PlanError if the device or the package is missing, or if no linear layer of ``blocks`` has suitable sizes."""
    missing = [] if computes_fp8(plan.mesh.device) else [f"a {plan.mesh.device} without fp8 products"]
    missing += [] if find_spec("torchao") else ["no torchao"]
    if missing:
        raise PlanError(
            given=f"precision 'fp8' on {' and '.join(missing)}",
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
    """Let the linear layers of ``blocks`` compute in fp8, in place. Called before they are sharded or wrapped."""
    from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]

    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=lambda layer, _path: fits(layer))


def fits(layer: nn.Module) -> bool:
    """Whether ``layer`` can compute in fp8."""
    return type(layer) is nn.Linear and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
