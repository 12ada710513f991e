"""Rules of losses and gradients. They cost no time, or steps that were skipped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from unisono.diagnose.corruption_facts import CorruptionFact
from unisono.diagnose.figures import listed, named_ranks
from unisono.diagnose.finding import Finding
from unisono.diagnose.run_facts import Floats, RunFacts, SkippedStep, TrainingFacts
from unisono.observe.nonfinite_events import NonfiniteOrigin

_SPIKE_WINDOW: Final = 50
_SPIKE_SIGMAS: Final = 8.0
_SPIKE_FACTOR: Final = 1.2
_WINDOWS_AT_ONCE: Final = 1 << 14  # a few MiB
_MIN_STEPS: Final = 50  # to judge how a norm grows
_MIN_STEPS_OF_FIT: Final = 200  # to judge whether a model learns


def non_finite_steps(facts: RunFacts) -> Iterator[Finding]:
    """NUM01: losses or gradients that are NaN or infinite."""
    origins = [(rank.rank, origin) for rank in facts.ranks for origin in rank.origins]
    searched = {origin.step for _, origin in origins}
    skipped = [
        (rank.rank, step)
        for rank in facts.ranks
        for step in rank.skipped
        if not math.isfinite(step.loss) or step.step in searched
    ]  # another finite loss with an infinite norm is how fp16 finds its loss scale
    if not skipped:
        return
    numbers = sorted({step.step for _, step in skipped})
    num_steps = max(rank.num_steps for rank in facts.ranks)
    share = len(numbers) / max(1, num_steps)
    causes = [
        (rank, step) for rank, step in skipped if step.rank_loss is not None and not math.isfinite(step.rank_loss)
    ]
    ranks = tuple(sorted({rank for rank, _ in origins or causes}))
    is_loss = any(not math.isfinite(step.loss) for _, step in skipped)
    yield Finding(
        id="NUM01",
        title=f"the {'loss' if is_loss else 'gradient'} is NaN or infinite in some steps",
        severity="critical" if share >= 0.03 else "warning",
        cost_frac=min(1.0, share),
        confidence=0.95 if causes or origins else 0.7,
        ranks=ranks if len(ranks) < len(facts.ranks) else (),
        evidence=(
            f"{len(numbers)} of {num_steps} steps were skipped: {listed(numbers)}",
            *(_sample_text(rank, step) for rank, step in causes[:3]),
            *_origin_texts(origins),
        ),
        advice=_advice(origins[0][1])
        if origins
        else "read these samples (loader order is fixed by the seed); if they are sound, a "
        "lower optim.lr, a longer warm-up or plan.precision=fp32",
    )


def _origin_texts(origins: Sequence[tuple[int, NonfiniteOrigin]]) -> Iterator[str]:
    """The first three places, each with the ranks that found it."""
    places: dict[tuple[int, str], list[tuple[int, NonfiniteOrigin]]] = {}
    for rank, origin in origins:
        places.setdefault((origin.step, origin.place), []).append((rank, origin))
    for (step, place), found in sorted(places.items(), key=lambda item: item[0][0])[:3]:
        samples = [sample for _, origin in found for sample in origin.sample_ids]
        text = f"; samples {listed(dict.fromkeys(samples))}" if samples else ""
        ranks = named_ranks(sorted({rank for rank, _ in found}))
        yield f"step {step}, {ranks}: first {found[0][1].value}: {place}{text}"


# where an operator of no named layer is; the root module has the empty name
_OUTSIDE_OF_LAYERS: Final = {
    "forward": "the model's own forward pass",
    "backward": "the objective and the model's own forward pass",
}


def _advice(origin: NonfiniteOrigin) -> str:
    if origin.where == "input":
        return f"fix or drop these samples: batch entry {origin.tensor!r} holds {origin.value} before any layer"
    if origin.where == "parameter":
        return (
            "the weights that the run began with are NaN or infinite: begin with another checkpoint or model.pretrained"
        )
    layer = origin.layer or _OUTSIDE_OF_LAYERS.get(origin.where, "the objective")
    operator = f" ({origin.operator})" if origin.operator else ""
    if origin.input_value == "inf":
        return (
            f"look at {layer}{operator}, whose inputs hold inf: an attention row with every position masked, or a sum that has "
            "overflowed before it; if samples are named, read them"
        )
    inputs = ", whose inputs are finite" if origin.input_value == "finite" else ""
    fix = "an epsilon or a clamp there" if origin.value == "nan" else "plan.precision=fp32, an epsilon or a clamp there"
    return f"look at {layer}{operator}{inputs}: {fix}; if samples are named, read them; else a lower optim.lr"


def _sample_text(rank: int, step: SkippedStep) -> str:
    samples = f"; its samples are {listed(step.sample_ids)}" if step.sample_ids else ""
    return f"step {step.step}: the sum of rank {rank}'s own losses is {step.rank_loss}{samples}"


def silent_corruption(facts: RunFacts) -> Iterator[Finding]:
    """SDC01: bits of the state changed, or a step gave other bits than before."""
    by_ranks: dict[tuple[int, ...], list[CorruptionFact]] = {}
    for rank in facts.ranks:
        for fact in rank.corruptions:
            by_ranks.setdefault(fact.ranks, []).append(fact)
    for ranks, found in by_ranks.items():
        is_certain = any(fact.is_certain for fact in found)
        hosts = ", ".join(list(dict.fromkeys(host for fact in found for host in fact.hosts))[:5]) or "their hosts"
        test = f"test memory and devices of {hosts}, and leave out what fails or what is named again"
        yield Finding(
            id="SDC01",
            title="silent corruption" + ("" if is_certain else " on one of several ranks"),
            severity="critical",
            cost_frac=0.0,
            confidence=0.95 if is_certain else 0.7,
            ranks=ranks,
            evidence=tuple(
                f"step {fact.step}, {fact.source}, {fact.tensor or 'a tensor'}: {fact.evidence}" for fact in found[-3:]
            ),
            advice="the same command continues from the newest checkpoint, which was compared before it was committed; "
            + (
                test if is_certain else f"{test}; a lower observe.verify_every_steps, or three replicas, would name one"
            ),
        )


def loss_spikes(facts: RunFacts) -> Iterator[Finding]:
    """NUM02: steps whose loss is far above those before it."""
    skipped = np.array(sorted({step.step for rank in facts.ranks for step in rank.skipped}), dtype=np.int64)
    trained = ~np.isin(facts.training.steps, skipped)  # a step that the guard has skipped did no harm
    losses, steps = facts.training.losses[trained], facts.training.steps[trained]
    if len(losses) <= _SPIKE_WINDOW:
        return
    spikes, middle = _spikes(losses)
    where = steps[spikes]
    if not len(where):
        return
    share = len(where) / len(losses)
    worst = int(np.argmax(losses[spikes] / np.maximum(middle, 1e-12)))
    skips = facts.settings.get("train.spike_sigmas")
    yield Finding(
        id="NUM02",
        title="the loss spikes",
        severity="critical" if share >= 0.03 else "warning",
        cost_frac=0.0,
        confidence=0.8,
        evidence=(
            f"{len(where)} of {len(losses)} steps: {listed(where.tolist())}",
            f"step {where[worst]}: {losses[spikes[worst]]:.4g}, the {_SPIKE_WINDOW} steps before it {middle[worst]:.4g}",
        ),
        advice="train.spike_sigmas skips such steps; look at their samples, and try a lower optim.lr or a longer warm-up",
        patch={"train.spike_sigmas": _SPIKE_SIGMAS} if skips == 0 else {},
    )


def _spikes(losses: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The places of losses far above the median of those before them, and these medians [spikes]."""
    windows, after = sliding_window_view(losses, _SPIKE_WINDOW), losses[_SPIKE_WINDOW:]
    # where the median of a window is below the loss, at least half of its losses are: few windows are left to sort
    below = np.zeros(len(after), np.int8)
    scaled = _SPIKE_FACTOR * losses
    for begin in range(_SPIKE_WINDOW):
        below += scaled[begin : begin + len(after)] < after
    high = np.flatnonzero(np.isfinite(after) & (below >= _SPIKE_WINDOW // 2))
    spikes, middles = [np.zeros(0, np.int64)], [np.zeros(0)]
    for begin in range(0, len(high), _WINDOWS_AT_ONCE):
        places = high[begin : begin + _WINDOWS_AT_ONCE]
        before = windows[places]
        middle = np.median(before, axis=1)
        is_high = after[places] > _SPIKE_FACTOR * middle  # not where a loss before is NaN
        places, before, middle = places[is_high], before[is_high], middle[is_high]
        with np.errstate(invalid="ignore"):  # infinite losses
            spread = 1.4826 * np.median(
                np.abs(before - middle[:, None]), axis=1
            )  # of a normal distribution: its deviation
            found = after[places] > middle + _SPIKE_SIGMAS * spread
        spikes.append(places[found] + _SPIKE_WINDOW)
        middles.append(middle[found])
    return np.concatenate(spikes), np.concatenate(middles)


def exploding_gradients(facts: RunFacts) -> Iterator[Finding]:
    """NUM03: the gradient grows from step to step."""
    norms = facts.training.grad_norms[np.isfinite(facts.training.grad_norms)]
    if len(norms) < _MIN_STEPS:
        return
    parts = [float(np.median(part)) for part in np.array_split(norms, 5)]
    growth = parts[-1] / max(parts[0], 1e-30)
    steadily = all(later > earlier for earlier, later in pairwise(parts))
    if not steadily or growth < 10:
        return
    yield Finding(
        id="NUM03",
        title="gradients grow from step to step",
        severity="critical" if growth >= 100 else "warning",
        cost_frac=0.0,
        confidence=0.8,
        evidence=(
            f"the norm is {parts[-1]:.3g} in the last fifth of the steps, {growth:,.0f} times that of the first",
            *_growing_layer(facts),
        ),
        advice="a lower optim.lr, optim.clip_norm, or a norm before the layer; train.gradient_stats_every_steps names the layer",
    )


def _growing_layer(facts: RunFacts) -> tuple[str, ...]:
    """The parameter whose gradient has grown most; nothing without statistics."""
    growth = {
        name: float(norms[-1] / norms[0])
        for name, norms in facts.training.layer_norms.items()
        if len(norms) > 1 and np.isfinite(norms).all() and norms[0] > 0
    }
    if not growth:
        return ()
    worst = max(growth, key=lambda name: growth[name])
    return (f"{worst} has grown most, {growth[worst]:,.0f} times",)


def dead_layers(facts: RunFacts) -> Iterator[Finding]:
    """NUM04: parameters that get no gradient, or next to none."""
    norms = {name: values[-3:] for name, values in facts.training.layer_norms.items() if len(values) >= 3}
    if len(norms) < 2:
        return
    largest = {name: float(values.max()) for name, values in norms.items() if np.isfinite(values).all()}
    alive = [value for value in largest.values() if value > 0]  # most of a model may be dead
    usual = float(np.median(alive)) if alive else 0.0
    dead = [name for name, value in largest.items() if value <= 1e-7 * usual]
    if not dead or not usual:
        return
    zeros = sum(largest[name] == 0 for name in dead)
    yield Finding(
        id="NUM04",
        title="parameters get no gradient",
        severity="warning",
        cost_frac=0.0,
        confidence=0.9 if zeros else 0.7,
        evidence=(
            f"{len(dead)} of {len(norms)}: {', '.join(dead[:5])}" + (", …" if len(dead) > 5 else ""),
            f"their norms are below {1e-7 * usual:.2g} in steps {listed(facts.training.layer_steps[-3:].tolist())}, "
            f"the median of those with a gradient is {usual:.3g}",
        ),
        advice="units that are never active, a detach(), or a layer whose output is not used: it does not learn; freeze it, or "
        "mend its activation or initial values",
    )


def overfitting(facts: RunFacts) -> Iterator[Finding]:
    """NUM05: the loss of evaluations rises while that of training falls."""
    training = facts.training
    losses = training.eval_losses
    if len(losses) < 4 or not np.isfinite(losses).all():
        return
    best = int(losses.argmin())
    rise = float(losses[-1] / losses[best]) - 1 if losses[best] > 0 else 0.0
    since = [_mean_loss(training, step) for step in (training.eval_steps[best], training.eval_steps[-1])]
    if best > len(losses) - 3 or rise < 0.02 or not since[1] < since[0]:
        return
    patience = facts.settings.get("train.early_stop_patience")
    if isinstance(patience, int) and len(losses) - 1 - best <= patience:
        return  # the run stops by itself
    yield Finding(
        id="NUM05",
        title="the model overfits",
        severity="critical" if rise >= 0.10 else "warning",
        cost_frac=0.0,
        confidence=0.8,
        evidence=(
            f"eval loss {losses[best]:.4g} at step {training.eval_steps[best]}, {losses[-1]:.4g} at step "
            f"{training.eval_steps[-1]}",
            f"train loss there {since[0]:.4g} and {since[1]:.4g}",
        ),
        advice="more or augmented data, dropout or weight decay; train.early_stop_patience ends such a run, and --best "
        "takes the best checkpoint",
        patch={"train.early_stop_patience": 3} if patience == 0 else {},
    )


def non_finite_evaluations(facts: RunFacts) -> Iterator[Finding]:
    """NUM09: evaluations whose loss is NaN or infinite, of a model whose training losses are finite."""
    training = facts.training
    if not len(training.steps):
        return
    # the step after an evaluation has the same parameters; after the last one there is none
    after = np.minimum(np.searchsorted(training.steps, training.eval_steps, side="right"), len(training.steps) - 1)
    is_bad = ~np.isfinite(training.eval_losses) & np.isfinite(training.losses[after])
    if not is_bad.any():
        return
    num_bad, first = int(is_bad.sum()), int(is_bad.argmax())
    yield Finding(
        id="NUM09",
        title="the loss of evaluations is NaN or infinite",
        severity="critical" if is_bad.all() else "warning",
        cost_frac=0.0,
        confidence=0.9,
        evidence=(
            f"{num_bad} of {len(is_bad)} evaluations; their steps: {listed(dict.fromkeys(training.eval_steps[is_bad].tolist()))}",
            f"eval loss {training.eval_losses[first]} at step {training.eval_steps[first]}, where the train loss is finite: "
            f"{training.losses[after[first]]:.4g} at step {training.steps[after[first]]}",
        ),
        advice="look at the held-out data: one sample with NaN, infinite or huge values makes the loss of all NaN; if it is "
        "sound, look at what model and objective do only in evaluations; such an evaluation is never the best one, and "
        "train.early_stop_patience counts it as one without gain",
    )


def underfitting(facts: RunFacts) -> Iterator[Finding]:
    """NUM08: a new model has learned next to nothing: train and eval loss are alike, flat and near the first loss."""
    training = facts.training
    losses, evals = training.losses[np.isfinite(training.losses)], training.eval_losses
    if len(losses) < _MIN_STEPS_OF_FIT or len(evals) < 3 or not np.isfinite(evals).all():
        return
    if facts.settings.get("model.pretrained") or losses[0] <= 0:
        return  # a model that was trained before begins near its end
    first, middle, last = (float(np.mean(part)) for part in (losses[:20], losses[-100:-50], losses[-50:]))
    is_flat = abs(middle - last) <= 0.01 * middle
    if not is_flat or last < 0.95 * first or last > 1.05 * first or abs(float(evals[-1]) - last) > 0.05 * last:
        return
    yield Finding(
        id="NUM08",
        title="the model has learned next to nothing",
        severity="warning",
        cost_frac=0.0,
        confidence=0.5,
        evidence=(
            f"train loss {first:.4g} in the first 20 steps, {last:.4g} in the last 50, and {middle:.4g} in the 50 before",
            f"eval loss {evals[-1]:.4g} at step {training.eval_steps[-1]}: it is not the training data that is hard",
        ),
        advice="another optim.lr, ten times higher and lower (observe.taps shows how far an update moves weights: NUM07); check "
        "that inputs and targets belong together; then a larger model",
    )


def _mean_loss(training: TrainingFacts, step: int) -> float:
    """Mean training loss of the steps up to ``step`` and a few before it."""
    end = int(np.searchsorted(training.steps, step, side="right"))
    part = training.losses[max(0, end - 20) : end]
    return float(np.mean(part)) if len(part) else float("nan")
