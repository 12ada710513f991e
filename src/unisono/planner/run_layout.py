"""The layout that a run has, for the record from which searches learn (``layout_record``)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from unisono.config.fields import option_tree
from unisono.plan.plan import Plan
from unisono.planner.devices import Device, Precision
from unisono.planner.layout import KEPT_BY_RUNS, Layout, LayoutError
from unisono.planner.model_files import SHAPED, built_in_shape
from unisono.planner.stage_blocks import blocks_per_stage
from unisono.tasks.model_names import default_model
from unisono.tasks.options import LANGUAGE_MODELS
from unisono.train.config import AUTO, RunConfig

# sections and settings by which a step does other work than a layout describes
_OTHER_WORK = (
    *("components.optimizer", "components.objective", "components.collate_fn", "components.batch_transform"),
    *("optim.kind", "optim.freeze", "train.ema_decay", "model.pretrained", "quantize.scheme", "distill.teacher"),
    *("observe.verify_every_steps",),
)


def layout_of_run(config: RunConfig, plan: Plan, device: Device, vocab: int) -> Layout | None:
    """The layout of the steps of a run; None where its model has no shape, or a step does what no layout describes.

    Args:
        config: The configuration.
        plan: The plan of all ranks.
        device: The device of each of them.
        vocab: Rows of the model's embedding.
    """
    name = default_model(config.task.kind) if config.components.model == AUTO else config.components.model
    leaves = option_tree(RunConfig).leaves
    if (
        name not in SHAPED
        or config.task.kind not in LANGUAGE_MODELS
        or any(_value(config, key) != leaves[key].default for key in _OTHER_WORK)
        or plan.sync.kind not in ("local", "dist_sync")
        or plan.precision.dtype_rules
        or plan.recompute.modules
        or plan.recompute.saved_ops
        or plan.fsdp.ignored_modules
        or plan.fsdp.shard_threshold_numel
    ):
        return None
    mesh, recompute = plan.mesh, plan.recompute
    in_pipeline = mesh.pp > 1
    try:
        layout = Layout(
            model=built_in_shape(config, str(name), vocab),
            device=device,
            precision=cast("Precision", plan.precision.compute),  # fp32 has no peak
            num_devices=mesh.world_size,
            tp=mesh.tp,
            pp=mesh.pp,
            stages_per_rank=plan.stages_per_rank if in_pipeline else 0,
            schedule=plan.pipeline.schedule if in_pipeline else None,
            cut="balanced",
            cp=mesh.cp,
            ep=mesh.ep,
            zero=plan.fsdp.zero if mesh.shard_degree > 1 else 0,
            dp_shard=mesh.dp_shard,
            micro_batch=plan.batch.micro_batch,
            global_batch=plan.batch.global_batch,
            seq_len=config.data.seq_len,
            recompute="partial" if recompute.blocks_per_stage else recompute.mode,
            recomputed_blocks=recompute.blocks_per_stage,
            offload=recompute.offload,
            compiled=plan.backend.compile != "off",
            keeps=KEPT_BY_RUNS,
        )
    except LayoutError:
        return None
    cut = plan.pipeline.layers_per_stage
    if not in_pipeline or not cut or cut == blocks_per_stage(layout):
        return layout
    try:
        return replace(layout, cut="given", layers_per_stage=cut)
    except LayoutError:  # of another model
        return None


def _value(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)
