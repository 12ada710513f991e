"""A configuration file for `unisono train` and `unisono plan auto`: the network of two blocks, its samples, their sum."""

from given import objective
from nets import deep
from shared_samples import INPUTS, TARGETS

from unisono import (
    Components,
    PlanOptions,
    RunConfig,
    from_map_style,
)


def config():
    data = from_map_style(list(zip(INPUTS, TARGETS, strict=True)))
    return RunConfig(
        plan=PlanOptions(global_batch=16, precision="fp32"),
        components=Components(
            model=lambda run: deep(),
            objective=objective,
            data=lambda run: (data, data),
        ),
    )
