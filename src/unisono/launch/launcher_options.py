"""The options of other launchers: what each decides, or why nothing here decides the same. Needs no torch.

Read from torch 2.13 (``torchrun``), accelerate 1.15, horovod 0.28.1, MindSpore 2.10 (``msrun``), Open MPI 4.1.4 (``mpirun``),
MXNet 1.9 (``tools/launch.py``) and the source of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

# what an option decides: see ``launcher_lines``
Decides = Literal[
    "",
    "num_processes",
    "num_per_host",
    "num_hosts",
    "num_servers",
    "hostfile",
    "host_list",
    "ssh_port",
    "max_restarts",
    "folder",
    "interface",
    "variable",
    "threads",
    "devices",
    "include",
    "precision",
    "module",
    "no_python",
    "no_local_rank",
    "tracker",
    "by_mpirun",
    "mpirun_text",
    "mpirun_words",
    "as_here",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherOption:
    """An option of another launcher.

    Attributes:
        names: How it is spelled.
        num_values: Number of words after it.
        decides: What it decides; ``as_here`` is what ``unisono launch`` does without an option. Empty: it has no counterpart.
        why: Why it has no counterpart, and what to use.
    """

    names: tuple[str, ...]
    num_values: int = 1
    decides: Decides = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """Another launcher.

    Attributes:
        options: Its options.
        runs_python: Whether it puts ``python`` before a script.
        num_processes: Its own default number of processes; 0: the accelerators of the host; -1: it must be given.
        passes_local_rank: Whether the script gets ``--local-rank`` or ``--local_rank`` as an argument.
        reads_anywhere: Whether its options may stand behind the command, as words of which it takes them.
        remarks: What it does without an option, as pairs of a subject and what is different here.
    """

    options: tuple[LauncherOption, ...]
    runs_python: bool = True
    num_processes: int = -1
    passes_local_rank: str = ""
    reads_anywhere: bool = False
    remarks: tuple[tuple[str, str], ...] = ()


def _decide(decides: Decides, *names: str, num_values: int = 1) -> LauncherOption:
    return LauncherOption(names=_spelled(names), num_values=num_values, decides=decides)


def _none(why: str, *names: str, num_values: int = 1) -> LauncherOption:
    return LauncherOption(names=_spelled(names), num_values=num_values, why=why)


def _each(why: str, *names: str, num_values: int = 1) -> tuple[LauncherOption, ...]:
    """Options of their own with the same reason."""
    return tuple(_none(why, name, num_values=num_values) for name in names)


def _spelled(names: tuple[str, ...]) -> tuple[str, ...]:
    """Each name as it is given, and with underscores in place of dashes."""
    return tuple(dict.fromkeys(spelled for name in names for spelled in (name, _underscored(name))))


def _dashed_too(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*names, *(name.replace("_", "-") for name in names))))


def _underscored(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name


_MEETING: Final = (
    "ranks of one host meet at a port that the launcher holds, those of several on the first host of the hosts file"
)
_ONCE: Final = (
    "the launch is run once, on one host, and reaches the others over ssh; ranks follow the order of the hosts file"
)
_FIXED: Final = "ranks that all-reduce have a fixed number; --elastic is for workers of parameter servers"
_STREAMS: Final = "rank 0 writes to the terminal, the others into logs of --dir"
_CORES: Final = "each process has its share of the host's cores (launch.num_threads); nothing is pinned"
_IN_PLAN: Final = (
    "the plan of a unisono program lays the model out: plan.dp_shard, plan.zero, plan.tp, plan.pp, plan.cp"
)
_IN_PROGRAM: Final = "it is a setting of the training program, not of its launch"
_COMPILE: Final = "plan.compile of a unisono program"
_FP8: Final = "plan.precision=fp8 of a unisono program"
_BY_MPIRUN: Final = "unisono launch --mpirun with --hostfile and --mpirun-args"
_TRACKER: Final = (
    "this launcher starts processes here or over ssh, or by mpirun or srun, and submits nothing to other systems"
)

_TORCHRUN: Final = (
    _decide("num_hosts", "--nnodes"),
    _decide("num_per_host", "--nproc-per-node"),
    *_each(_MEETING, "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
    _decide("as_here", "--standalone", num_values=0),
    _decide("max_restarts", "--max-restarts"),
    _none("the end of a process is noticed at once, without polling", "--monitor-interval"),
    _none("processes are started as programs", "--start-method"),
    _none("launch.json in the folder of the launch records each process and attempt", "--event-log-handler"),
    _none("all processes of a launch are workers; with --servers also servers", "--role"),
    _decide("module", "-m", "--module", num_values=0),
    _decide("no_python", "--no-python", num_values=0),
    _none("each process is an interpreter of its own", "--run-path", num_values=0),
    _decide("folder", "--log-dir"),
    _none(_STREAMS, "-r", "--redirects"),
    _none(_STREAMS, "-t", "--tee"),
    *_each(
        _STREAMS, "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--logs-specs"
    ),
    _none(_ONCE, "--node-rank"),
    *_each(_MEETING, "--master-addr", "--master-port"),
    _none("--interface names the network interface of every host", "--local-addr"),
    _none(_CORES, "--numa-binding"),
    _none("SIGTERM and SIGINT reach all processes; other signals are not forwarded", "--signals-to-handle"),
    _none("processes have 30 s to end after a signal (launch.grace_s of unisono train)", "--shutdown-timeout"),
    _none(
        "a process sees all devices of its host; LOCAL_RANK is the number of its own",
        "--virtual-local-rank",
        num_values=0,
    ),
)

_MSRUN: Final = (
    _decide("num_processes", "--worker_num"),
    _decide("num_per_host", "--local_worker_num"),
    *_each(_MEETING, "--master_addr", "--master_port"),
    _none(_ONCE, "--node_rank"),
    _decide("folder", "--log_dir"),
    _none(
        "the launch always waits for its processes, and ends with the exit code of the one that failed first", "--join"
    ),
    _none("ranks wait launch.timeout_s for each other, 60 s or more at the start", "--cluster_time_out"),
    *_each(_CORES, "--bind_core", "--bind_numa"),
    *_each("unisono train --dry-run traces a step of a rank without the others", "--sim_level", "--sim_rank_id"),
    _none("addresses of devices are not needed: the ranks find each other", "--rank_table_file"),
    *_each(_STREAMS, "--worker_log_name", "--tail_worker_log"),
)

_HOROVODRUN: Final = (
    _decide("num_processes", "-np", "--num-proc"),
    _decide("host_list", "-H", "--hosts"),
    _decide("hostfile", "-hostfile", "--hostfile"),
    _decide("ssh_port", "-p", "--ssh-port"),
    _none("put the key into ~/.ssh/config", "-i", "--ssh-identity-file"),
    _decide("interface", "--network-interfaces", "--network-interface"),
    _decide("folder", "--output-filename"),
    _decide("as_here", "--gloo", num_values=0),
    _decide("by_mpirun", "--mpi", num_values=0),
    _decide("mpirun_text", "--mpi-args"),
    _none(_TRACKER, "--jsrun", num_values=0),
    _none("ranks wait launch.timeout_s for each other, 60 s or more at the start", "--start-timeout"),
    _none("the file holds arguments of horovodrun: give them as arguments to translate them too", "--config-file"),
    _none("it starts nothing", "-v", "--version", num_values=0),
    _none("it starts nothing", "-cb", "--check-build", num_values=0),
    _none("nothing is cached", "--disable-cache", num_values=0),
    _none("--dry-run shows what would run", "--verbose", num_values=0),
    *_each("sums are in buckets, in the background", "--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity"),
    *_each(
        "sums over several hosts are hierarchical where that sends less",
        *(
            "--hierarchical-allreduce",
            "--no-hierarchical-allreduce",
            "--hierarchical-allgather",
            "--no-hierarchical-allgather",
        ),
        *("--torus-allreduce", "--no-torus-allreduce"),
        num_values=0,
    ),
    *_each("unisono plan finds the layout before the run", "--autotune", "--no-autotune", num_values=0),
    *_each(
        "unisono plan finds the layout before the run",
        *("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample"),
        *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
    ),
    _none(_FIXED, "--min-np", "--min-num-proc"),
    _none(_FIXED, "--max-np", "--max-num-proc"),
    *_each(_FIXED, "--slots-per-host", "--elastic-timeout", "--reset-limit", "--host-discovery-script"),
    LauncherOption(names=("--blacklist-cooldown-range",), num_values=2, why=_FIXED),
    _none("unisono profile records a run", "--timeline-filename"),
    *_each("unisono profile records a run", "--timeline-mark-cycles", "--no-timeline-mark-cycles", num_values=0),
    *_each("each rank has a watchdog, which says who is missing", "--no-stall-check", "--stall-check", num_values=0),
    *_each(
        "each rank has a watchdog; launch.timeout_s bounds a collective",
        *("--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"),
    ),
    *_each("MPI carries nothing here", "--mpi-threads-disable", "--no-mpi-threads-disable", "--tcp", num_values=0),
    _none(_CORES, "--binding-args"),
    _none("NCCL's own variables say so: --env NCCL_…", "--num-nccl-streams"),
    _none(_CORES, "--thread-affinity"),
    _none("launch.timeout_s bounds a collective", "--gloo-timeout-seconds"),
    _none("NCCL_DEBUG and TORCH_CPP_LOG_LEVEL, by --env", "--log-level"),
    *_each(
        "each line of other hosts begins with its rank and host",
        *("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp", "--no-log-hide-timestamp"),
        num_values=0,
    ),
    _none(
        "lines of other hosts begin with rank and host",
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        num_values=0,
    ),
)

_ACCELERATE: Final = (
    _decide("num_processes", "--num_processes"),
    _decide("num_hosts", "--num_machines"),
    _decide("threads", "--num_cpu_threads_per_process"),
    _decide("devices", "--gpu_ids"),
    _decide("precision", "--mixed_precision"),
    _decide("as_here", "--multi_gpu", num_values=0),
    _decide("module", "-m", "--module", num_values=0),
    _decide("no_python", "--no_python", num_values=0),
    _decide("folder", "--log_dir"),
    _decide("max_restarts", "--max_restarts"),
    _none("plan.device=cpu of a unisono program; or --env ACCELERATE_USE_CPU=true", "--cpu", "--use_cpu", num_values=0),
    _none(
        "the file holds arguments of accelerate launch: give them as arguments to translate them too", "--config_file"
    ),
    _none(_ONCE, "--machine_rank"),
    _none(_MEETING, "--same_network", num_values=0),
    *_each(_MEETING, "--main_process_ip", "--main_process_port", "--rdzv_backend", "--rdzv_conf"),
    _none("the end of a process is noticed at once, without polling", "--monitor_interval"),
    _none("all processes of a launch are workers; with --servers also servers", "--role"),
    _none(_STREAMS, "-t", "--tee"),
    _none("an error is shown once, with its traceback", "-q", "--quiet", num_values=0),
    _none(_CORES, "--enable_cpu_affinity", num_values=0),
    _none(_IN_PROGRAM, "--debug", num_values=0),
    *_each(
        _BY_MPIRUN,
        *("--mpirun_hostfile",),
    ),
    *_each(
        _COMPILE,
        *("--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--dynamo_use_regional_compilation"),
        num_values=0,
    ),
    *_each(
        _COMPILE,
        *("--dynamo_backend", "--dynamo_mode"),
    ),
    *_each(
        _FP8,
        *("--fp8_use_autocast_during_eval",),
        num_values=0,
    ),
    *_each(
        _FP8,
        *("--fp8_backend", "--fp8_margin", "--fp8_interval", "--fp8_format", "--fp8_amax_history_len"),
        *("--fp8_amax_compute_algo", "--fp8_override_linear_precision", "--fp8_opt_level"),
        *("--fp8_enable_fsdp_float8_all_gather", "--fp8_pad_inner_dim"),
    ),
    *_each(
        _IN_PLAN,
        *("--deepspeed_config_file", "--zero_stage", "--offload_optimizer_device", "--offload_param_device"),
        *("--offload_optimizer_nvme_path", "--offload_param_nvme_path", "--zero3_init_flag"),
        *("--zero3_save_16bit_model", "--deepspeed_hostfile", "--deepspeed_exclusion_filter"),
        *("--deepspeed_inclusion_filter", "--deepspeed_multinode_launcher"),
        *("--deepspeed_moe_layer_cls_names", "--fsdp_version", "--fsdp_offload_params"),
        *("--fsdp_min_num_params", "--fsdp_sharding_strategy", "--fsdp_reshard_after_forward"),
        *("--fsdp_auto_wrap_policy", "--fsdp_transformer_layer_cls_to_wrap", "--fsdp_backward_prefetch"),
        *("--fsdp_state_dict_type", "--fsdp_forward_prefetch", "--fsdp_use_orig_params"),
        *("--fsdp_cpu_ram_efficient_loading", "--fsdp_sync_module_states"),
        *("--fsdp_activation_checkpointing", "--fsdp_activation_checkpointing_offload"),
        *("--megatron_lm_tp_degree", "--megatron_lm_use_custom_fsdp", "--megatron_lm_no_load_optim"),
        *("--megatron_lm_eod_mask_loss", "--megatron_lm_overlap_cpu_optimizer_d2h_h2d"),
        *("--megatron_lm_no_save_optim", "--megatron_lm_optimizer_cpu_offload"),
        *("--megatron_lm_use_precision_aware_optimizer", "--megatron_lm_decoder_last_pipeline_num_layers"),
        *("--megatron_lm_pp_degree", "--megatron_lm_num_micro_batches"),
        *("--megatron_lm_sequence_parallelism", "--megatron_lm_recompute_activations"),
        *("--megatron_lm_use_distributed_optimizer", "--megatron_lm_gradient_clipping"),
        *("--megatron_lm_recompute_granularity", "--megatron_lm_recompute_method"),
        *("--megatron_lm_recompute_num_layers", "--megatron_lm_attention_backend"),
        *("--megatron_lm_expert_model_parallel_size", "--megatron_lm_context_parallel_size"),
        *("--megatron_lm_attention_dropout", "--megatron_lm_hidden_dropout"),
        *("--megatron_lm_attention_softmax_in_fp32", "--megatron_lm_expert_tensor_parallel_size"),
        *("--megatron_lm_calculate_per_token_loss", "--megatron_lm_use_rotary_position_embeddings"),
        *("--parallelism_config_dp_replicate_size", "--parallelism_config_dp_shard_size"),
        *("--parallelism_config_tp_size", "--parallelism_config_cp_size", "--parallelism_config_cp_backend"),
        *("--parallelism_config_cp_comm_strategy", "--parallelism_config_sp_size"),
        *("--parallelism_config_sp_backend", "--parallelism_config_sp_seq_length"),
        *("--parallelism_config_sp_seq_length_is_variable", "--parallelism_config_sp_attn_implementation"),
    ),
    *_each(
        _IN_PLAN,
        *("--use_deepspeed", "--use_fsdp", "--use_parallelism_config", "--use_megatron_lm"),
        num_values=0,
    ),
    _none(_TRACKER, "--no_tpu_cluster", num_values=0),
    *_each(
        _IN_PROGRAM,
        *("--main_training_function", "--gradient_accumulation_steps", "--gradient_clipping"),
    ),
    *_each(
        _TRACKER,
        *("--tpu", "--tpu_cluster", "--tpu_use_sudo", "--downcast_bf16"),
        num_values=0,
    ),
    *_each(
        _TRACKER,
        *("--vm", "--env", "--aws_access_key_id", "--aws_secret_access_key"),
    ),
)

_DEEPSPEED: Final = (
    _decide("num_hosts", "--num_nodes"),
    _decide("num_per_host", "--num_gpus", "--num_accelerators"),
    _decide("hostfile", "-H", "--hostfile"),
    _decide("include", "-i", "--include"),
    _none("leave the hosts out of the hosts file; devices by --env CUDA_VISIBLE_DEVICES", "-e", "--exclude"),
    _decide("module", "--module", num_values=0),
    _decide("no_python", "--no_python", num_values=0),
    _decide("no_local_rank", "--no_local_rank", num_values=0),
    _decide("ssh_port", "--ssh_port"),
    *_each(_MEETING, "--master_port", "--master_addr"),
    _none(_ONCE, "--node_rank"),
    *_each(_ONCE, "--no_ssh", "--no_ssh_check", "--force_multi", num_values=0),
    *_each(_FIXED, "--min_elastic_nodes", "--max_elastic_nodes"),
    _none(_FIXED, "--elastic_training", num_values=0),
    _none("--hostfile is over ssh, --mpirun by Open MPI, --srun by SLURM", "--launcher"),
    _none("--mpirun-args, with --mpirun", "--launcher_args"),
    _none("launch.json in the folder of the launch has the pids", "--save_pid", num_values=0),
    _none(_STREAMS, "--enable_each_rank_log"),
    _none("unisono plan auto, and unisono tune", "--autotuning"),
    *_each("--srun starts a step of an allocation that exists", "--comment", "--account"),
    _none(_CORES, "--bind_cores_to_rank", num_values=0),
    _none(_CORES, "--bind_core_list"),
)

_MXNET: Final = (
    _decide("num_processes", "-n", "--num-workers"),
    _decide("num_servers", "-s", "--num-servers"),
    _decide("hostfile", "-H", "--hostfile", "--host-file"),
    _decide("tracker", "--launcher", "--cluster"),
    _decide("variable", "--env"),
    _decide("variable", "--env-worker"),
    _none("variables of --env are for workers and servers", "--env-server"),
    _none("the working folder is at the same path on all hosts; nothing is copied", "--sync-dst-dir"),
    _none(
        "sums begin with the gradients that the next step needs first; the wire of servers is our own",
        "--p3",
        num_values=0,
    ),
)

# options of mpirun without and with a value that are handed through
_HANDED: Final = (
    *("-allow-run-as-root", "-bind-to-core", "-bind-to-socket", "-bycore", "-bynode", "-byslot", "-continuous"),
    *("-debug-daemons-file", "-debug-daemons", "-debug", "-disable-recovery", "-display-allocation"),
    *("-display-devel-allocation", "-display-devel-map", "-display-diffable-map", "-display-map", "-display-topo"),
    *("-do-not-launch", "-do-not-resolve", "-enable-instant-on-support", "-enable-recovery", "-get-stack-traces"),
    *("-index-argv-by-rank", "-leave-session-attached", "-merge-stderr-to-stdout", "-nolocal", "-nooversubscribe"),
    *("-oversubscribe", "-novm", "-output-proctable", "-pernode", "-report-bindings", "-report-child-jobs-separately"),
    *("-report-state-on-timeout", "-set-cwd-to-session-dir", "-show-progress", "-tag-output", "-timestamp-output"),
    *(
        "-use-hwthread-cpus",
        "-xml",
        "-noprefix",
        "-preload-binary",
        "-quiet",
        "-verbose",
        "-fwd-mpirun-port",
        "-q",
        "-v",
    ),
    *("-s", "-d", "-tv", "-debug-devel", "-use-regexp"),
)
_HANDED_WITH_VALUE: Final = (
    *("-bind-to", "-map-by", "-rank-by", "-ppr", "-prefix", "-preload-files", "-N", "-am", "-cpu-list", "-cpu-set"),
    *("-cpus-per-proc", "-cpus-per-rank", "-launch-agent", "-max-restarts", "-max-vm-size", "-npernode", "-npersocket"),
    *("-ompi-server", "-output-filename", "-path", "-personality", "-report-events", "-report-pid", "-report-uri"),
    *("-rankfile", "-rf", "-stdin", "-timeout", "-tune", "-cartofile", "-cf", "-hnp", "-debugger", "-wdir", "-wd"),
    *("-xml-file", "-xterm"),
)


def _dashed(name: str) -> tuple[str, ...]:
    """A name of Open MPI, with two dashes and one; short names, and two long ones, have one dash only."""
    return (name,) if len(name) == 2 or name in ("-am", "-tune") else ("-" + name, name)


_MPIRUN: Final = (
    LauncherOption(names=("-n", "--n", "-np", "--np", "-c"), decides="num_processes"),
    LauncherOption(
        names=tuple(
            f"{dashes}{name}" for name in ("hostfile", "machinefile", "default-hostfile") for dashes in ("-", "--")
        ),
        decides="hostfile",
    ),
    LauncherOption(names=("-H", "-host", "--host"), decides="host_list"),
    LauncherOption(names=("-x",), decides="variable"),
    *(
        LauncherOption(names=_dashed(name), num_values=2, decides="mpirun_words")
        for name in ("-mca", "-gmca", "-prtemca", "-pmixmca")
    ),
    *(LauncherOption(names=_dashed(name), num_values=0, decides="mpirun_words") for name in _HANDED),
    *(LauncherOption(names=_dashed(name), decides="mpirun_words") for name in _HANDED_WITH_VALUE),
    LauncherOption(names=("-app", "--app"), why="a launch has one program"),
)


LAUNCHERS: Final[Mapping[str, Launcher]] = {
    "torchrun": Launcher(options=_TORCHRUN, num_processes=1),
    "torch.distributed.launch": Launcher(
        options=(*_TORCHRUN, _decide("no_local_rank", "--use-env", num_values=0)),
        num_processes=1,
        passes_local_rank="--local-rank",
    ),
    "msrun": Launcher(
        options=_MSRUN,
        num_processes=8,
        remarks=(("msrun", "the program itself is MindSpore's until it is ported: docs/from-mxnet-mindspore.md"),),
    ),
    "horovodrun": Launcher(
        options=_HOROVODRUN,
        runs_python=False,
        remarks=(
            (
                "horovodrun",
                "HOROVOD_RANK and the like are not set: hvd.init() needs horovodrun, or a port to torch.distributed",
            ),
        ),
    ),
    "accelerate": Launcher(
        # Accelerate takes each name also with dashes in place of underscores
        options=tuple(replace(option, names=_dashed_too(option.names)) for option in _ACCELERATE),
        num_processes=0,
        remarks=(("accelerate launch", "the file of accelerate config is not read"),),
    ),
    "deepspeed": Launcher(options=_DEEPSPEED, num_processes=0, passes_local_rank="--local_rank"),
    "mpirun": Launcher(options=_MPIRUN, runs_python=False),
    "launch.py": Launcher(options=_MXNET, runs_python=False, reads_anywhere=True),
}
