"""Every benchmark: its script and the rows of its table. Standard library only.

README's table has the rows with a ``headline``, under that label. Rows with an aim come before the wildcard that shows the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import figures
from benchmarks.figures import Row, at_least, at_most


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A script in this folder. ``quick``: arguments of a short run, which measures nothing."""

    name: str
    title: str
    script: str = ""  # where it is not of the benchmark's name
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    text: str
    rows: tuple[Row, ...]

    @property
    def module(self) -> str:
        """The script's name below ``benchmarks``."""
        return self.script or self.name


_DIFFERENCE = figures.number("{:.1e}")
_RECORDS = figures.contestant("records_per_s", "records/s")
_IMAGES = figures.contestant("images_per_s", "images/s")
_TOKENS = figures.contestant("million_tokens_per_s", "million tokens/s")
_NOT_RUN = Row("{0}", "not_run/*", figures.not_run)
_EARLIER_COMMIT = (
    Row("commit before", "before", figures.text),
    Row("{0}, {1}: now / before", "times/*/*", aim=at_most(1.02)),
)


def _rivals(*, same: str = "", default: str = "") -> tuple[Row, ...]:
    return (
        Row(
            "{0}, same: fastest rival / unisono",
            "sizes/*/same/contestants",
            figures.fastest_rival,
            aim=at_least(1),
            headline=same,
        ),
        Row(
            "{0}, default: fastest rival / unisono",
            "sizes/*/default/contestants",
            figures.fastest_rival_by_default,
            aim=at_least(2, "≥ 2 with native bf16"),
            headline=default,
        ),
        Row("{0}, same: {1} / unisono", "sizes/*/same/contestants/*", figures.rival),
        Row("{0}, default: {1} / unisono", "sizes/*/default/contestants/*", figures.rival),
        Row("{0}: plain script with {1} / without", "sizes/*/launcher/contestants/*", figures.rival),
    )


# --- the benchmarks, in the order of the page ------------------------------------------------------------------------

BENCHMARKS = (
    Benchmark(
        name="step_time",
        title="Step time against a hand-written loop",
        quick=("--blocks", "6"),
        text="The demo's GPT trained by `Trainer` and by a bare PyTorch loop (fused AdamW, `clip_grad_norm_`, chunked loss) in "
        "alternating blocks of one process, and by DDP in two processes. The floor is 1: the loop logs, guards and saves "
        "nothing and finds its batches in memory. Host time is the same difference with a model of 38 tiny parameters and no "
        "arithmetic.",
        rows=(
            Row(
                "Trainer / hand-written loop, 1 process: wall",
                "one_process/wall",
                aim=at_most(1.02),
                headline="Step time of `Trainer` ÷ a hand-written loop, 1 process",
            ),
            Row(
                "Trainer / DDP, 2 processes: wall",
                "two_processes/wall",
                aim=at_most(1.02),
                headline="Step time of `Trainer` ÷ DDP, 2 processes",
            ),
            Row(
                "Trainer / FSDP2, 2 processes, state sharded over both: wall",
                "two_processes_sharded/wall",
                aim=at_most(1.03),
            ),
            Row("Trainer / hand-written loop: CPU time", "one_process/cpu", aim=at_most(1.02)),
            Row("Trainer / DDP: CPU time", "two_processes/cpu", aim=at_most(1.02)),
            Row("Trainer / FSDP2: CPU time", "two_processes_sharded/cpu", aim=at_most(1.03)),
            Row("largest loss difference, {0}", "*/largest_relative_loss_difference", _DIFFERENCE),
            Row("host time of a step outside model code", "host_time_per_step", figures.host_time),
        ),
    ),
    Benchmark(
        name="parallel_axes",
        script="parallel.axes",
        title="Each axis of a plan against torch's primitives by hand",
        quick=("--blocks", "3"),
        text="A GPT 512 wide on two processes of one thread, fp32, both sides in the same processes in turns. The floor is 1 "
        "where both do the same: the hand-written side logs, guards and saves nothing and finds its batches in memory.",
        rows=(
            Row(
                "largest of all axes: wall",
                "axes",
                figures.largest_ratio("wall"),
                aim=at_most(1.03),
                headline="Step time of `Trainer` ÷ torch's parallel primitives by hand, 2 processes, the largest of all axes",
            ),
            Row("{0}: Trainer / {parent[what]}: wall", "axes/*/wall", aim=at_most(1.03)),
            Row("{0}: CPU time", "axes/*/cpu", aim=at_most(1.03)),
            Row(
                "{0}: largest loss difference",
                "axes/*/largest_relative_loss_difference",
                _DIFFERENCE,
                aim=at_most(1e-4, "≤ 1e-4"),
            ),
            Row("{0}: largest part of the parameters on a rank", "axes/*/held_frac", figures.number("{:.3f}")),
            _NOT_RUN,
        ),
    ),
    Benchmark(
        name="parallel_start",
        script="parallel.start",
        title="Start of a job on two processes",
        quick=("--rounds", "1"),
        text="From the start of the processes, without a launcher, to the end of their first step. The hand-written script reads "
        "batches and weights from a file; ours reads configuration and prepared data.",
        rows=(Row("{0}: Trainer / by hand", "axes/*", figures.start_of_job), _NOT_RUN),
    ),
    Benchmark(
        name="parallel_memory",
        script="parallel.memory",
        title="Memory of a rank where the state is sharded",
        quick=("--steps", "3", "--rounds", "1"),
        text="Tensor bytes of one of two ranks by ZeRO stage, from torch's allocator; the larger of the two ranks. The number "
        "is the stage; Accelerate's 2 keeps parameters gathered after the forward pass.",
        rows=(
            Row("{0}: peak / {1}", "contestants/*/peak_over_*", figures.number("{:.3f}"), aim=at_most(1.05)),
            Row(
                "unisono{0}: parameters and optimizer state",
                "contestants/unisono*",
                figures.state_bytes,
                aim=at_most(0, "+0 bytes"),
            ),
            Row("{0}: parameters and optimizer state", "contestants/*", figures.state_bytes),
            Row("{0}: peak of a step", "contestants/*", figures.peak_bytes),
            _NOT_RUN,
        ),
    ),
    Benchmark(
        name="parallel_gathers",
        script="parallel.gathers",
        title="Gathering sharded parameters in bf16",
        quick=("--blocks", "3"),
        text="A GPT 512 wide with ZeRO 3 on two processes of one thread, against FSDP2 by hand: *autocast* gathers in fp32, "
        "*policy* has norms and hidden states in bf16 too. Both sides in the same processes in turns.",
        rows=(
            Row("Trainer / {0}: wall", "others/*/wall"),
            Row("Trainer / {0}: CPU time", "others/*/cpu"),
            Row("Trainer / {0}: bytes gathered", "others/*/gathered_bytes_over_hand", figures.number("{:.3f}")),
            Row("{0}: largest loss difference", "others/*/largest_relative_loss_difference", _DIFFERENCE),
        ),
    ),
    Benchmark(
        name="parallel_recompute",
        script="parallel.recompute",
        title="What recompute trades",
        quick=("--blocks", "2"),
        text="One process, the GPT of the axes; losses of all three are equal bit for bit.",
        rows=(
            Row("{0}: kept for the backward pass", "kinds/*", figures.of_none("kept_bytes")),
            Row("{0}: peak of a step above its state", "kinds/*", figures.of_none("peak_bytes")),
            Row("{0}: step time / none", "kinds/*/over_none", figures.ratio_but_none),
        ),
    ),
    Benchmark(
        name="parallel_compilations",
        script="parallel.compilations",
        title="Compilations after warm-up",
        quick=("--epochs", "2"),
        text="Graphs that torch.compile makes, with accumulation and epochs whose last step is short.",
        rows=(Row("{0}", "rows/*", figures.compilations, aim=at_most(0, "0 after it")),),
    ),
    Benchmark(
        name="rivals",
        title="The same GPT under other frameworks",
        arguments=("--sizes", "demo", "--rounds", "21", "--steps", "4"),
        quick=("--rounds", "3"),
        text="Every contestant computes the same losses from the same batches, ready in memory for all but unisono, which "
        "reads its data. Ratios are the rival's time over ours, so above 1 means that we are faster; the fastest rival is the "
        "one with the smallest paired median. `same`: fp32, "
        "fused kernel and threads; ours as its launcher starts it, theirs as theirs do. `demo` is the demo's GPT, 128 wide. "
        "`default`: nothing set; ours as `unisono train` runs it, with console, "
        "trackers and checkpoints. The launcher's lines are the plain script with one thing more, below 1 where it helps. The "
        "floor of `same` is the plain script: a framework cannot do less arithmetic. The launcher "
        "sets a short spin of waiting threads only where others use the host, which costs time where nobody does.",
        rows=_rivals(
            same="Step time of the fastest of a plain script, Accelerate, Lightning and MindSpore ÷ ours, same options, "
            "the demo's GPT"
        ),
    ),
    Benchmark(
        name="rivals_wide",
        script="rivals",
        title="The same GPT, 768 wide",
        arguments=("--sizes", "wide", "--parts", "same,default", "--rounds", "9"),
        quick=("--rounds", "3"),
        text="As above, where matrix products decide.",
        rows=_rivals(),
    ),
    Benchmark(
        name="rivals_wider",
        script="rivals",
        title="The same GPT, 1024 wide",
        arguments=("--sizes", "wider", "--parts", "default", "--rounds", "7"),
        quick=("--rounds", "3"),
        text="Defaults only, as above: how the advantage of bf16 grows with the share of matrix products.",
        rows=_rivals(
            default="The same with nothing set, 1024 wide (unisono chooses bf16 where the processor multiplies it natively)"
        ),
    ),
    Benchmark(
        name="precision",
        title="Loss curve of bf16 against fp32",
        quick=("--seeds", "2", "--steps", "30"),
        text="Held-out loss of the demo after the same steps. What bf16 changes should be less than what another seed changes.",
        rows=(
            Row(
                "bf16 minus fp32 of the same seed, mean over seeds ÷ standard deviation between seeds of fp32",
                "",
                figures.difference_over_noise,
                aim=at_most(1, "≤ 1: within noise"),
            ),
            Row("held-out loss, {0}, one per seed", "held_out_loss/*", figures.losses_by_seed),
        ),
    ),
    Benchmark(
        name="checkpoint_stall",
        title="Stall of a save",
        quick=("--rounds", "2"),
        text="Extra wall time of a training window because of a save, until it is durable, over the time of a synchronous save "
        "of torch.distributed.checkpoint (DCP) of the same state. The floor is 0; bytes cannot go below the state's own.",
        rows=(
            Row(
                "extra wall time until committed ÷ DCP's save: async",
                "kinds/async",
                figures.extra_time,
                aim=at_most(0.1),
                headline="Extra wall time of an asynchronous save ÷ a synchronous save of torch.distributed.checkpoint",
            ),
            Row("extra wall time until committed ÷ DCP's save: {0}", "kinds/*", figures.extra_time),
            Row("time that training waits for the call ÷ DCP's save: {0}", "kinds/*/call_s", figures.waiting_time),
            Row("seconds of DCP's save", "dcp_sync_s", figures.number("{:.3f}")),
            Row("bytes written / state bytes", "written_over_state_bytes", figures.number("{:.4f}")),
        ),
    ),
    Benchmark(
        name="diagnosis",
        script="observe.diagnosis",
        title="What a diagnosis says of runs whose cause is known, and what accounting costs",
        quick=("--rounds", "1", "--steps", "30", "--blocks", "4"),
        text="Runs of `unisono train`. A cause makes every step longer by at least 30 %; the true cost is measured against runs "
        "without it, in pairs. A gain is measured by a run with the settings that the diagnosis proposes. Steps without "
        "accounting measure no phases, speed, memory, garbage collections and traffic, write no events, and have neither monitor "
        "nor watchdog; the loader's five readings of the clock, look-ups at collectives and three numbers that the sum of the "
        "losses carries are on both sides. Monitor, watchdog and `links` events work seldom: their time is spread over all steps "
        "with accounting.",
        rows=(
            Row(
                "{0}: named cost / true cost",
                "costs/*/named_over_true",
                figures.distance_from_one,
                aim=at_most(0.2, "0.8 to 1.2"),
            ),
            Row(
                "{0}: {node[rule]} and its rank were named",
                "costs/*",
                figures.rounds_right,
                aim=at_least(1, "every time"),
            ),
            Row("{0}: true gain / expected gain", "gains/*/true_over_expected", aim=at_least(0.5)),
            Row("healthy {0}: findings", "healthy/*", figures.num_findings, aim=at_most(0)),
            Row("steps with accounting / without, {0}: wall", "overhead/*/wall", aim=at_most(1.01)),
            Row("steps with accounting / without, {0}: CPU time", "overhead/*/cpu", aim=at_most(1.01)),
            Row("a step without accounting, seconds, {0}", "overhead/*/step_s", figures.number("{:.4f}")),
            Row("what accounting adds to it, seconds, {0}", "overhead/*/added_s", figures.number("{:.6f}")),
            Row(
                "part of a step that monitor, watchdog and `links` events take, {0}",
                "overhead/*/rare_frac",
                figures.number("{:.3%}"),
            ),
            Row("a step that is computed twice / another, {0}: CPU time", "verification/*/single/cpu"),
            Row(
                "steps of which each 300th is computed twice / others, {0}: CPU time",
                "verification/*/at_cadence/cpu",
                aim=at_most(1.01),
            ),
        ),
    ),
    Benchmark(
        name="profilers",
        script="observe.profilers",
        title="What profilers say of the same faulty runs",
        quick=("--only", "healthy, 1 process;slow loader"),
        text="One small model and data set with one fault at a time, which takes at least 30 % of a step or is there in each: "
        "under `unisono train` with a profile of three steps, judged by `unisono diagnose`; a plain loop with DDP under "
        "`traceml run`, and under torch.profiler; Lightning's Trainer under its three profilers. unisono and TraceML give "
        "verdicts: right where one names the cause, and the rank where the fault has one; of a healthy run none is. TraceML's "
        "residual counts for whatever is outside of the passes. A finding that neither names the fault nor follows from it is "
        "false. The others print tables: right where the row with the most time of its own (for the leak: memory) is the "
        "function, operator or phase of the fault, and is not the top row of "
        "the healthy run too; for the rank, where that is so on this rank alone. A table of a healthy run counts as right. "
        "`not reported`: it watches nothing of the kind. A run that hangs is killed after a minute, and `unisono diagnose` "
        "judges what it left. `not run`: torch's DDP and Lightning have no such run.",
        rows=(
            Row("unisono: right", "tools/unisono", figures.right_of_total, aim=at_least(1, "all")),
            Row("{0}: right", "tools/*", figures.right_of_total),
            Row(
                "unisono: findings beside the fault", "tools/unisono/false_findings", figures.num_false, aim=at_most(0)
            ),
            Row("{0}: findings beside the fault", "tools/*/false_findings", figures.num_false),
            Row("{0}", "faults/*", figures.answers),
            Row("{0}: version", "versions/*", figures.text),
        ),
    ),
    Benchmark(
        name="observe_scale",
        script="observe.scale",
        title="Diagnosis, report and `top` of very large runs",
        quick=("--lines", "20000", "--rounds", "1"),
        text="A million made-up step events, of 1,000 ranks and of one, with those of monitor and links every hundred steps of a "
        "rank and an evaluation every 500. `top` is `unisono top --once`, `goodput` the ledger by itself, which is part of the "
        "report. The floor is reading the lines and decoding none. In a damaged run one line of a hundred is cut short, has "
        "values of other types or is no step, and some ranks have no file.",
        rows=(
            Row("{0}: {1}, seconds", "runs/*/*/s", figures.spread_of_seconds, aim=at_most(10, "≤ 10 s")),
            Row("{0}: {1}, memory", "runs/*/*/peak_bytes", figures.size, aim=at_most(2**30, "≤ 1 GiB")),
            Row("{0}: report", "runs/*/report_bytes", figures.size, aim=at_most(2**20, "≤ 1 MiB")),
        ),
    ),
    Benchmark(
        name="tune_search",
        script="tune.search",
        title="Searches of settings",
        quick=("--rounds", "1", "--trials", "2", "--seeds", "3"),
        text="Overhead: trainings of two steps of a small model, of which nearly all is the start of a process, in "
        "`unisono tune params`, in a loop with Optuna by hand (ask and tell, a journal, a process for each trial), and one after "
        "the other without a search. Quality: the best of forty trials on made-up losses of four settings with a known best "
        "value, by seed; the regret is that value minus the best there is.",
        rows=(
            Row("{0}, time of a trial", "overhead/ratios/*"),
            Row("{0}: regret of TPE / random", "quality/losses/*/tpe_over_random", aim=at_most(1)),
            Row("{0}: TPE better than random", "quality/losses/*/tpe_wins", figures.text),
            Row("{0}: regret of unisono / of Optuna by hand, TPE", "quality/losses/*/unisono_over_optuna"),
            Row("{0}: version", "versions/*", figures.text),
        ),
    ),
    Benchmark(
        name="compress",
        title="Quantized models against torchao, pruning, and training with rounded numbers",
        quick=("--rounds", "3", "--steps", "30"),
        text="A perceptron 1024-4096-1024 with 32 rows, and a GPT 256 wide with 8 sequences of 128 tokens, trained before on an "
        "artificial language; all in one process, from the same weights. Bytes are of all tensors, kept ones too. Quality is the "
        "relative error of the perceptron's outputs, and the GPT's held-out loss. torchao has its closest configuration: int8 "
        "and int4 weights (32 of a row share a scale), and int8 activations with a scale per token. unisono by torchao is the "
        "back end of that name, which computes the weights of unisono. What pruning and training with rounded numbers cost and "
        "bring is held-out loss, for three seeds, as docs/smaller-models.md describes.",
        rows=(
            Row("{0}, {1}: time of unisono / torchao", "models/*/time_over_torchao/*"),
            Row("{0}, {1}: time of quantize.backend=torchao / torch", "models/*/time_by_torchao/*"),
            Row("{0}, {1}: time / fp32", "models/*/time_over_fp32/*"),
            Row("{0}, {1}: bytes / fp32", "models/*/bytes_over_fp32/*", figures.number("{:.3f}")),
            Row("{0}, {1}: quality", "models/*/quality/*", figures.number("{:.4f}")),
            Row("gpt, {0}: quality minus fp32's", "models/gpt/quality_minus_fp32/*", figures.number("{:+.1e}")),
            Row("{0}, pruning: loss, {1}", "prune/seeds/*/loss/*", figures.number("{:.3f}")),
            Row("{0}, pruning: MiB on disk {1}", "prune/seeds/*/mib/*", figures.number("{:.2f}")),
            Row("{0}, pruning: time of a forward pass / before", "prune/seeds/*/time_ratio", figures.number("{:.2f}")),
            Row("{0}, training with rounded numbers: loss, {1}", "aware/seeds/*/*", figures.number("{:.4f}")),
            Row("torchao", "torchao", figures.text),
            _NOT_RUN,
        ),
    ),
    Benchmark(
        name="quality_documents",
        script="quality.duplicates",
        title="Near-duplicates among documents",
        quick=("--rounds", "1", "--documents", "2000", "--sizes", "2000"),
        text="Whole commands, which write the kept documents, one process for the work, on the same JSONL of made-up documents "
        "of 1.4 KB, of which one in twenty is a copy with a few other words. All compare sets of five words from a similarity "
        "of 0.8 on, with 128 hashes (datatrove: its 14 x 8). rensa alone is a script around the package that unisono uses "
        "too: n-grams as strings, and its deduplicator; it writes nothing. Recall is over copies with a similarity of 0.8 or "
        "more, precision over all that is dropped. The cost by size is without what a corpus of one document takes.",
        rows=(
            Row("text-dedup / unisono: time", "together/over/text-dedup", aim=at_least(3)),
            Row("datatrove / unisono: time", "together/over/datatrove", aim=at_least(3)),
            Row("rensa alone / unisono: time", "together/over/rensa alone", aim=at_least(0.8)),
            Row("{0}", "together/contestants/*", figures.of_deduplicator("documents")),
            Row(
                "largest size / smallest: time of a document",
                "growth/largest_over_smallest",
                figures.number("{:.2f}"),
                aim=at_most(1.1, "≤ 1.1: flat"),
            ),
            Row(
                "{0}: time beyond that of one document, and memory",
                "growth/sizes/*",
                figures.cost_of_document,
                aim=at_most(66.7, "≥ 15,000 documents/s"),
            ),
        ),
    ),
    Benchmark(
        name="quality_images",
        script="quality.images",
        title="Near-duplicates among images",
        quick=("--rounds", "1", "--photos", "100"),
        text="Whole commands, one process for the work, on a folder of made-up photos of 500 x 375, of which one in twenty has"
        " four copies: re-encoded with less quality, at half the size, brighter, and a part with sides of 0.7 to 0.95. "
        "unisono checks the images too, and compares all pairs; imagededup has PHash and its default distance of 10.",
        rows=(
            Row("{0} / unisono: time", "together/over/*"),
            Row("{0}", "together/contestants/*", figures.of_deduplicator("images")),
        ),
    ),
    Benchmark(
        name="quality_story",
        script="quality.story",
        title="From raw text to a tuned training",
        quick=("--seeds", "1", "--steps", "5"),
        text="Source files and documentation of the standard libraries of several Pythons, one of six names; so most documents"
        " have near-copies, as in a crawl. A small GPT is trained for the same number of steps on what each step leaves; "
        "bits per byte of one test set, the part `test` of `data split`, from which nothing is in any training set (`data"
        " leak`). The first two rows are of the usual way: documents of the raw corpus held out at random, those of them "
        "that leak from the training set and those that do not. By seed.",
        rows=(
            Row("{0}: bits per byte", "trainings/*", figures.bits_by_seed),
            Row("{0}: documents and text", "sets/*", figures.size_of_set),
            Row("learning rate that `tune lr` proposes", "proposed_lr", figures.number("{:.2g}")),
        ),
    ),
    Benchmark(
        name="planner_published",
        script="planner.published",
        title="Step times and memory predicted from shapes",
        quick=("--folds", "2"),
        text="Mean relative error of `unisono plan simulate` against published runs, by constants that have not seen the row: "
        "fitted without one of five random parts, or without the row's source. The guess is one utilization for each device and "
        "arithmetic, the median of its rows. Intervals are made from other sources. Rank correlation (Spearman) by speed, within"
        " one model on one number of devices with at least four layouts, sources left out; regret is what the pick loses. "
        "Memory: the median error and predicted over published; one layout has 34 to 48 GiB in rows of several "
        "versions of PyTorch. Unseen rows are those of `unseen_rows.csv`, from other documents, to which nothing is fitted: the "
        "constants that ship predict them, and the guess is the median utilization of the rows of the other file.",
        rows=(
            Row("{0}", "devices/*", figures.prediction_error),
            Row(
                "rows within the interval of nine of ten: {0}",
                "coverage/*",
                figures.number("{:.1%}"),
                aim=at_least(0.85),
            ),
            Row("ranking of {0}", "groups/*", figures.ranking, aim=at_least(0.7)),
            Row("regret of {0}", "groups/*", figures.regret, aim=at_most(0.1)),
            Row("rows that are {0}", "rows/*", figures.number("{}")),
            Row("constant `{0}`", "constants/*", figures.constant),
            Row("memory, all rows", "memory/all", figures.memory_error, aim=at_most(0.08)),
            Row("memory, {0}", "memory/*", figures.memory_error),
            Row("unseen rows, {0}", "unseen/devices/*", figures.unseen_error),
            Row("unseen rows of {0}", "unseen/documents/*", figures.document_error),
            Row(
                "unseen rows within the interval of nine of ten",
                "unseen/coverage",
                figures.number("{:.1%}"),
                aim=at_least(0.85),
            ),
            Row("unseen rows, ranking of {0}", "unseen/groups/*", figures.ranking, aim=at_least(0.7)),
            Row("unseen rows, regret of {0}", "unseen/groups/*", figures.regret, aim=at_most(0.1)),
            Row("unseen rows that are {0}", "unseen/rows/*", figures.number("{}")),
            Row(
                "unseen rows, memory of torchtitan, torchtune, litgpt and nanotron",
                "unseen/memory/known",
                figures.memory_error,
                aim=at_most(0.08),
            ),
            Row("unseen rows, memory of {0}", "unseen/memory/programs/*", figures.memory_error),
        ),
    ),
    Benchmark(
        name="planner_estimators",
        script="planner.estimators",
        title="Memory beside the estimators of others",
        quick=("--published",),
        text="Median error of predicted memory, and predicted over measured, of ours and of estimators of others on the same "
        "runs; each is asked only of runs that have the parallelism it speaks of. `unisono plan simulate` knows shapes "
        "alone and counts states, gathered parameters, activations and logits; against reserved memory it adds what the "
        "allocator keeps, by a factor that is fitted to rows of torchtitan among these, so its count without it is shown "
        "too. `unisono train --dry-run` traces the run. DeepSpeed's functions for ZeRO 2 and 3 count states of its own "
        "engine alone: 18 bytes of a parameter that ranks share, with 4 of the largest layer or 2 of all parameters. "
        "Accelerate's `estimate-memory` counts states with Adam alone, on one device. Against a peak these two show which "
        "part of it states are: they claim no more. Megatron-LM's report counts states (18 bytes of a parameter, or 6 and "
        "12 that data ranks share) and activations without attention's scores. Published: reserved memory, on one device "
        "active memory; of Megatron-LM's tests, allocated memory between steps and at the peak. Executed: live tensors of "
        "bf16 runs of a GPT on this CPU, of the rank that has most; they are unisono's, which keep 16 bytes of a "
        "parameter, where `plan simulate` takes 18 with a weight in 16 bits too; with `tp` it takes sequence parallelism, "
        "which Megatron-LM's test has not. MindSpore's search is not here: its CPU package refuses it (docs/log.md).",
        rows=(
            Row(
                "executed ranks, {0}: unisono train --dry-run",
                "errors/executed ranks/*/unisono train --dry-run",
                figures.accuracy,
                aim=at_most(0.005),
            ),
            Row(
                "published, FSDP2, peak: unisono plan simulate",
                "errors/published, FSDP2/peak/unisono plan simulate",
                figures.accuracy,
                aim=at_most(0.08),
            ),
            Row("{0}, {1}: {2}", "errors/*/*/*", figures.accuracy),
            _NOT_RUN,
            Row("version of {0}", "versions/*", figures.text),
        ),
    ),
    Benchmark(
        name="planner_search",
        script="planner.search_time",
        title="Search for the fastest layout",
        quick=("--rounds", "1"),
        text="`unisono plan` as a command, with its start: medians of seconds, peak memory, and layouts that were compared.",
        rows=(
            Row("{0}", "jobs/*", figures.search_time),
            Row("step of our plan over that of the published one, both predicted", "choices", figures.choice),
            Row("published layouts that are predicted to fit: {0}", "choices/published_that_fit/*", figures.fitting),
        ),
    ),
    Benchmark(
        name="planner_layouts",
        script="planner.measured_layouts",
        title="Step times predicted from ranks that are timed alone",
        quick=("--limit", "2", "--steps", "3"),
        text="Layouts of a GPT on two processes of one thread, really run, against the prediction of `unisono plan auto`: the "
        "time of a rank whose collectives return at once, and the measured time of what it exchanges. The layout that is "
        "predicted to be the fastest is compared with the fastest one.",
        rows=(
            Row("median error of the step time", "summary/step_time", figures.accuracy, aim=at_most(0.1)),
            Row(
                "steps within the stated interval of nine of ten",
                "summary/step_time/covered",
                figures.number("{:.2f}"),
                aim=at_least(0.85),
            ),
            Row("rank correlation", "summary/rank_correlation", figures.number("{:.3f}"), aim=at_least(0.7)),
            Row(
                "chosen layout over the fastest",
                "summary/chosen_over_best",
                figures.number("{:.3f}"),
                aim=at_most(1.05),
            ),
            Row("slowest layout over the fastest", "summary/slowest_over_best", figures.number("{:.2f}")),
            Row("error by axis: {0}", "axes/*", figures.accuracy),
        ),
    ),
    Benchmark(
        name="planner_learned",
        script="planner.learned_layouts",
        title="What the search of layouts learns from runs",
        quick=(),
        text="The measured layouts of the benchmark above, predicted by `unisono plan` from shapes alone: the constants are "
        "fitted to accelerators, and steps of this small model are mostly what no constant is of. Beside it, the same times "
        "what is learned from all layouts but the one that is predicted. Medians over the runs of that benchmark.",
        rows=(
            Row("median error, {0} learning", "summary/*/median", figures.number("{:.1%}")),
            Row("mean error, {0} learning", "summary/*/mean", figures.number("{:.1%}")),
            Row("rank correlation, {0} learning", "summary/*/rank_correlation", figures.number("{:.3f}")),
            Row("chosen layout over the fastest, {0} learning", "summary/*/chosen_over_best", figures.number("{:.3f}")),
        ),
    ),
    Benchmark(
        name="planner_device",
        script="planner.device_steps",
        title="Memory and step time on an accelerator",
        quick=("--limit", "1"),
        text="Steps of a GPT of a Llama's shape on one device. Memory: `unisono train --dry-run` on the device, over what its "
        "allocator handed out. Time: `unisono plan simulate`, which knows the model's shape and the device's name alone, over "
        "the measured step; its constants are fitted to published runs, mostly of compiled models.",
        rows=(
            Row("memory, traced", "memory/traced", figures.accuracy, aim=at_most(0.03)),
            Row("step time from the shape, {0}", "time/*", figures.accuracy),
        ),
    ),
    Benchmark(
        name="events",
        title="Events",
        quick=("--events", "500"),
        text="Step events through the log with each view attached. The floor is the file alone: encoding and one write.",
        rows=(Row("{0}", "results/*", figures.event_rate),),
    ),
    Benchmark(
        name="data_records",
        script="data.records",
        title="Records: formats of loaders",
        quick=("--rounds", "1"),
        text="The same payloads in every format, read in order and at random; a contestant that could not run says why. "
        "Speeds are of the median block. Opening is that of a RecordIO file of ten million records.",
        rows=(
            Row("{0}: unisono", "tables/*/contestants/unisono", _RECORDS, aim=at_least(0.8)),
            Row(
                "{0}: unisono always / limit crc",
                "tables/*",
                figures.speed_over("unisono always", "limit crc"),
                aim=at_least(0.8),
            ),
            Row("{0}: {1}", "tables/*/contestants/*", _RECORDS),
            Row("{0}: {1}", "tables/*/not_run/*", figures.not_run),
            Row(
                "open a file of many records: unisono",
                "open/contestants/unisono",
                figures.opening,
                aim=at_most(50, "≤ 50 ms"),
            ),
            Row("open a file of many records: {0}", "open/contestants/*", figures.opening),
            Row("open a file of many records: {0}", "open/not_run/*", figures.not_run),
        ),
    ),
    Benchmark(
        name="data_images",
        script="data.images",
        title="Images to training batches",
        quick=("--rounds", "1", "--steps", "8", "--photos", "640"),
        text="JPEGs of 500x375 to RandomResizedCrop(224), flip and normalised float32 batches of 64 with two workers each. "
        "Crops and flips of all were measured on their output and agree, or the line says so. `tiles` are lossless restart "
        "markers, `packed` is re-encoded at a short side of 256, `cached` decoded in memory; the last word is what resizes. "
        "The fastest rival is the one with the highest paired median.",
        rows=(
            Row(
                "unisono untouched opencv / fastest rival",
                "",
                figures.speed_over_fastest("unisono untouched opencv"),
                aim=at_least(1.1),
                headline="Images/s, untouched JPEGs to normalised random crops, ÷ the fastest other loader",
            ),
            *(
                Row(
                    f"unisono {kind} opencv / fastest rival",
                    "",
                    figures.speed_over_fastest(f"unisono {kind} opencv"),
                    aim=at_least(bound),
                )
                for kind, bound in (("tiles", 1.5), ("packed", 2.1), ("cached", 3.3))
            ),
            *(
                Row(f"unisono {kind} torch / fastest rival", "", figures.speed_over_fastest(f"unisono {kind} torch"))
                for kind in ("untouched", "tiles", "packed", "cached")
            ),
            Row("{0}", "contestants/*", _IMAGES),
            _NOT_RUN,
        ),
    ),
    Benchmark(
        name="data_tokens",
        script="data.tokens",
        title="Tokens to training batches",
        quick=("--rounds", "1", "--steps", "20"),
        text="Batches of 16 x 1,024 of 50 million uint16 tokens; the number is that of workers. The floor is one gather and one "
        "conversion. `mask`, the default, adds weights, positions and documents, which the others do not give. The fastest rival "
        "is the one with the highest paired median.",
        rows=(
            Row(
                "unisono windows ignore / floor rows",
                "",
                figures.speed_over("unisono windows ignore", "floor rows"),
                aim=at_least(0.6),
            ),
            Row(
                "unisono sliding ignore / floor sliding",
                "",
                figures.speed_over("unisono sliding ignore", "floor sliding"),
                aim=at_least(0.6),
            ),
            Row(
                "unisono windows ignore / fastest rival",
                "",
                figures.speed_over_fastest("unisono windows ignore", ("unisono", "floor")),
                aim=at_least(3),
                headline="Token windows/s ÷ the fastest other loader",
            ),
            Row(
                "unisono windows ignore / torch 0",
                "",
                figures.speed_over("unisono windows ignore", "torch 0"),
                aim=at_least(3),
            ),
            Row(
                "unisono loader ignore 0 / fastest rival",
                "",
                figures.speed_over_fastest("unisono loader ignore 0", ("unisono", "floor")),
                aim=at_least(3),
            ),
            Row(
                "unisono loader ignore 0 / torch 0",
                "",
                figures.speed_over("unisono loader ignore 0", "torch 0"),
                aim=at_least(3),
            ),
            Row(
                "unisono loader mask 0 / torch 0",
                "",
                figures.speed_over("unisono loader mask 0", "torch 0"),
                aim=at_least(3),
            ),
            Row(
                "unisono loader mask 1 / torch 0",
                "",
                figures.speed_over("unisono loader mask 1", "torch 0"),
                aim=at_least(3),
                headline="The same through `Loader` with its defaults and one worker (adds weights, positions and documents) ÷ "
                "torch's `DataLoader` without workers, which gives tokens alone",
            ),
            Row("{0}", "contestants/*", _TOKENS),
            _NOT_RUN,
            Row("slots whose target does not count, best fit", "packing", figures.padding("")),
            Row("slots whose target does not count, side by side", "packing", figures.padding("stream_")),
        ),
    ),
    Benchmark(
        name="data_order",
        script="data.order",
        title="Mixing, resume, damage",
        text="What loaders do with order and with damaged files; no times. Resume is by world size, after 37 of 156 steps on 2x4 "
        "ranks. unisono's global batch stays; the others keep 8 samples a rank.",
        rows=(
            Row(
                "repeated / lost after a resume on other ranks: unisono",
                "resume/contestants/unisono",
                figures.repeated_and_lost,
                aim=at_most(0, "0 / 0"),
                headline="Samples repeated / lost after a resume on another number of ranks (ranks: repeated / lost)",
            ),
            Row("damage: unisono{0}", "damage/contestants/unisono*", figures.damage, aim=at_most(0, "never silent")),
            Row("shards in a batch of 64, of 20: {0}", "mixing/contestants/*/shards_per_batch", figures.text),
            Row(
                "repeated / lost after a resume on other ranks: {0}", "resume/contestants/*", figures.repeated_and_lost
            ),
            Row("damage: {0}", "damage/contestants/*", figures.damage),
            Row("{0}: {1}", "*/not_run/*", figures.not_run),
        ),
    ),
    Benchmark(
        name="data_loader",
        script="data.loader",
        title="The loader itself",
        quick=("--rounds", "1", "--steps", "100", "--tuning-s", "12"),
        text="Batches of 64 of a data set that does nothing, so that only the loader is left; its first batch; memory with 8 "
        "workers; what tuning gains when nothing is set.",
        rows=(
            Row("overhead: {0}", "overhead/contestants/*", figures.contestant("us_per_batch", "µs per batch")),
            Row("overhead: {0}", "overhead/not_run/*", figures.not_run),
            Row("first batch: {0}", "first/contestants/*/first_ms", figures.number("{:,} ms")),
            Row("memory added, 10^6 objects: {0}", "memory/contestants/*", figures.added_memory),
            Row("tuning, samples that are {0}", "tuning/contestants/*", figures.tuning),
        ),
    ),
    Benchmark(
        name="kvstore_pushpull",
        script="kvstore.pushpull",
        title="Push and pull against MXNet",
        quick=("--rounds", "1", "--repeats", "2", "--layouts", "2x1", "--sizes", "1KB,10MB"),
        text="Workers and servers on one host, one thread each; `2x1` is 2 workers and 1 server; every sum of ours was checked. "
        "`dist_sync` is over Gloo without shared memory, `_shm` through shared memory; it has no servers. `all_reduce` is "
        "torch's on gloo. The limits are a memcpy and as many bytes through a bare socket, there and back.",
        rows=(
            Row(
                "2x1, 100MB: times faster is dist_sync_shm than mxnet dist_sync",
                "layouts/2x1/sizes/100MB/times_faster/dist_sync_shm than mxnet dist_sync",
                aim=at_least(5),
                headline="Push and pull of 100 MB, `dist_sync` through shared memory, times as fast as MXNet's, 2 workers",
            ),
            Row(
                "2x1, 100MB: times faster is dist_sync than mxnet dist_sync",
                "layouts/2x1/sizes/100MB/times_faster/dist_sync than mxnet dist_sync",
                aim=at_least(5),
                headline="The same over Gloo without shared memory",
            ),
            Row(
                "2x1, 100MB: times faster is dist_async than mxnet dist_async",
                "layouts/2x1/sizes/100MB/times_faster/dist_async than mxnet dist_async",
                aim=at_least(2),
                headline="The same of `dist_async` over TCP, 1 server",
            ),
            Row(
                "{0}, {1}: times faster is dist_async than mxnet dist_async",
                "layouts/*/sizes/*/times_faster/dist_async than mxnet dist_async",
                aim=at_least(2),
            ),
            Row(
                "{0}, {1}: times faster is dist_async_shm than mxnet dist_async",
                "layouts/*/sizes/*/times_faster/dist_async_shm than mxnet dist_async",
                aim=at_least(3),
            ),
            Row(
                "{0}, {1}: dist_sync_shm / all_reduce, time",
                "layouts/*/sizes/*/times_faster/all_reduce than dist_sync_shm",
                aim=at_most(1.05),
            ),
            Row("{0}, {1}: times faster is {2}", "layouts/*/sizes/*/times_faster/*"),
            Row("{0}, {1}: ms", "layouts/*/sizes/*/seconds", figures.milliseconds),
            Row("{0}: compression auto", "layouts/*/auto", figures.text),
            _NOT_RUN,
        ),
    ),
    Benchmark(
        name="kvstore_step",
        script="kvstore.step",
        title="A step against DistributedDataParallel",
        quick=("--blocks", "4", "--steps", "1"),
        text="Two processes of one thread on gloo; both sides in the same processes in turns, with the same weights and batches.",
        rows=(
            Row("{0}: bucketed all-reduce / DDP: wall", "models/*/wall", aim=at_most(1.02)),
            Row("{0}: CPU time", "models/*/cpu", aim=at_most(1.02)),
            Row(
                "{0}: largest loss difference",
                "models/*/relative_loss_difference",
                _DIFFERENCE,
                aim=at_most(1e-4, "≤ 1e-4"),
            ),
        ),
    ),
    Benchmark(
        name="kvstore_links",
        script="kvstore.links",
        title="Compression and local steps over slow links",
        quick=("--rounds", "1", "--steps", "1"),
        text="A GPT of 3.4 million parameters, two workers in network namespaces, links limited by a token bucket. Local steps "
        "are amortised over their round. `auto` chooses among bf16 and int8 only.",
        rows=(
            Row("{0}: {1}", "rates/*/ways/*", figures.step_over_link),
            Row("{0}: auto", "rates/*/auto/reason", figures.text),
            _NOT_RUN,
        ),
    ),
    Benchmark(
        name="kvstore_convergence",
        script="kvstore.convergence",
        title="What converges how",
        quick=("--seeds", "1", "--steps", "32"),
        text="Held-out loss of small models after the same samples, under every way to keep workers in step: the mean and the "
        "standard deviation over seeds, and the mean difference to plain sums of the same seed and optimizer. The aim is two "
        "standard deviations between seeds of plain sums. docs/kvstore.md says what is equal.",
        rows=(Row("{0}: {1} ({node[optimizer]}, {node[lr]:g})", "models/*/ways/*", figures.loss_of_a_way),),
    ),
    Benchmark(
        name="kvstore_faults",
        script="kvstore.faults",
        title="Killed workers and servers",
        quick=("--rounds", "1"),
        text="SIGKILL to what others wait for. A worker's lease ends two seconds after its last connection closed; a server "
        "comes back with its newest snapshot, and most of that time it imports torch.",
        rows=(Row("{0}: until {1}", "killed/*/*", figures.spread_of_seconds),),
    ),
    Benchmark(
        name="order",
        title="Order of samples",
        text="Positions per second of the keyed order, which stores nothing, and of numpy's stored permutation.",
        rows=(
            Row("order, calls of {0}", "order, calls of *", figures.rates_by_size),
            Row("numpy Generator{0}", "numpy Generator*", figures.rates_by_size),
        ),
    ),
    Benchmark(
        name="earlier_commit",
        title="An earlier commit against this one",
        quick=("--rounds", "1"),
        text="The time of this code over that of the commit `before`, process by process in turns: whole processes for the "
        "start, the demo's model in fp32 for the steps, batches of 64 samples of 128 bytes for the loader, two workers for "
        "push and pull.",
        rows=_EARLIER_COMMIT,
    ),
    Benchmark(
        name="earlier_commit_push_pull",
        script="earlier_commit",
        title="An earlier commit against this one: more pairs of push and pull",
        arguments=("--only", "push and pull", "--rounds", "24"),
        quick=("--rounds", "1"),
        text="As above. The times of a process that measures pushes differ by a tenth and more from those of the next, so a few "
        "pairs decide nothing.",
        rows=_EARLIER_COMMIT,
    ),
    Benchmark(
        name="footprint",
        title="Start-up, size, demo",
        quick=("--repeats", "3", "--no-demo"),
        text="Whole processes, so that nothing is hidden; `python` alone is the floor of the start-up times and `import torch` "
        "what the command line avoids. The size is what pip adds to an environment with torch.",
        rows=(
            Row("help, whole process", "start/help", figures.whole_process, aim=at_most(0.2, "≤ 0.2 s")),
            Row("{0}, whole process", "start/*", figures.whole_process),
            Row("install beyond torch", "install", figures.install_size),
            Row("of it unisono itself", "install/unisono_bytes", figures.size),
            Row("torch, for comparison", "install/torch_bytes", figures.size),
            Row("demo, first start ever", "demo/first_s", figures.number("{:.0f} s")),
            Row("demo, data already prepared", "demo/prepared_data_s", figures.number("{:.0f} s")),
            Row("demo, started again after its end", "demo/finished_run_again_s", figures.number("{:.1f} s")),
        ),
    ),
)
