"""Objectives and the inputs of forward: any form of outputs, losses of torch.nn, means, and losses of the model itself."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

from unisono import ObserveOptions, PlanOptions, Trainer, TrainOptions
from unisono.errors import CheckpointError, ConfigError, DataError, PlanError
from unisono.optim.learning_rate import ScheduledRates
from unisono.train.metrics import top_k
from unisono.train.objectives import (
    as_objective,
    cross_entropy,
    mean_squared_error,
    model_loss,
    next_token,
)
from unisono.train.step import input_selector


def text(exception: pytest.ExceptionInfo[Any]) -> list[str]:
    (problem,) = exception.value.problems
    return [problem.given, problem.rule, problem.consequence, problem.nearest]


# --- outputs ---------------------------------------------------------------------------------------------------------

LOGITS, TARGETS = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12).reshape(3, 4) % 5


def test_class_without_a_logit_is_named() -> None:
    with pytest.raises(DataError) as caught:
        cross_entropy(torch.zeros(3, 5), {"targets": torch.tensor([4, -100, 7])})
    assert str(caught.value) == (
        "a target of 7 for logits of 5 classes\n"
        "  rule: classes are 0 to 4; -100 does not count\n"
        "  so:   there is no logit of that class\n"
        "  try:  a model with 8 outputs, or targets that count from 0"
    )


@pytest.mark.parametrize(
    "outputs", [LOGITS, SimpleNamespace(logits=LOGITS), {"logits": LOGITS, "hidden": None}], ids=type
)
def test_objectives_and_metrics_take_logits_in_any_form(outputs: Any) -> None:
    targets = TARGETS.clone()
    targets[0, 0] = -100
    weights = torch.linspace(0, 1, 12).reshape(3, 4)
    losses = F.cross_entropy(LOGITS.flatten(0, 1), targets.flatten(), reduction="none")
    counted = weights.flatten() * (targets.flatten() >= 0)
    for objective in (next_token, cross_entropy):
        loss_sum, weight = objective(outputs, {"targets": targets, "weights": weights})
        assert float(loss_sum) == pytest.approx(float((losses * weights.flatten()).sum()))
        assert float(weight) == pytest.approx(float(counted.sum()))
        assert float(objective(outputs, {"targets": targets})[1]) == 11
        # a weight per sample counts for all of its tokens
        assert float(objective(outputs, {"targets": TARGETS, "weights": torch.tensor([1.0, 0, 1])})[1]) == 8
    metric = top_k(1)
    sums = metric.sums(outputs, {"targets": targets, "weights": weights}, weight, weight)
    hits = (LOGITS.argmax(-1) == targets).flatten()
    assert sums.tolist() == pytest.approx([float((hits * counted).sum()), float(counted.sum())])


def test_outputs_without_logits() -> None:
    with pytest.raises(DataError) as raised:
        next_token({"hidden": LOGITS}, {"targets": TARGETS})
    assert text(raised) == [
        "a model that returned dict with hidden",
        "a built-in objective or metric takes a tensor, or outputs with .logits or ['logits']",
        "there is nothing to compare with the targets",
        "return the logits from forward, or give an objective (outputs, batch) -> (loss_sum, weight)",
    ]


def test_a_batch_without_targets() -> None:
    with pytest.raises(DataError) as raised:
        next_token(LOGITS, {"labels": TARGETS, "input_ids": TARGETS})
    assert text(raised) == [
        "a batch with input_ids, labels",
        "built-in objectives and metrics compare the outputs with batch['targets']",
        "there is nothing to compare with",
        "name the labels 'targets'; or the objective 'model_loss', if the model makes a loss of them itself",
    ]


def test_targets_of_another_shape() -> None:
    with pytest.raises(DataError) as raised:
        cross_entropy(LOGITS, {"targets": TARGETS[:, :3]})
    assert text(raised) == [
        "targets [3, 3] for outputs [3, 4, 5]",
        "targets of these outputs are [3, 4]",
        "outputs and targets cannot be matched",
        "a data set or transform that gives targets of that shape, or an objective of your own",
    ]
    with pytest.raises(DataError, match=r"targets \[4\] for outputs \[3, 1\]"):
        mean_squared_error(torch.zeros(3, 1), {"targets": torch.zeros(4)})


def test_regression_of_one_output_is_no_table_of_pairs() -> None:
    """[B, 1] minus [B] would be every prediction against every target."""
    predictions, targets = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 0.0, 1.0])
    loss_sum, weight = mean_squared_error(SimpleNamespace(logits=predictions), {"targets": targets})
    assert (float(loss_sum), float(weight)) == (13.0, 3.0)


# --- losses of torch.nn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 0.1]), label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 0.1]), ignore_index=4),
        nn.NLLLoss(ignore_index=0),
    ],
    ids=lambda loss: f"{loss}{loss.ignore_index}{loss.label_smoothing if hasattr(loss, 'label_smoothing') else ''}",
)
def test_classes_of_a_torch_loss_have_its_true_weight(loss: Any) -> None:
    objective = as_objective(loss)
    parts = [objective(LOGITS[rows], {"targets": TARGETS[rows]}) for rows in (slice(0, 1), slice(1, 3))]
    total = sum(part[0] for part in parts) / sum(part[1] for part in parts)
    assert float(total) == pytest.approx(float(loss(LOGITS.flatten(0, 1), TARGETS.flatten())), rel=1e-6)
    # rows of weight 0 are not there
    loss_sum, weight = objective(LOGITS, {"targets": TARGETS, "weights": torch.tensor([1.0, 0.0, 0.0])})
    assert float(loss_sum / weight) == pytest.approx(float(loss(LOGITS[0], TARGETS[0])), rel=1e-6)


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), nn.SmoothL1Loss(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))],
)
def test_elements_of_a_torch_loss_have_its_true_weight(loss: Any) -> None:
    objective = as_objective(loss)
    outputs, targets = LOGITS[:, 0], torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    parts = [objective(outputs[rows], {"targets": targets[rows]}) for rows in (slice(0, 1), slice(1, 3))]
    total = sum(part[0] for part in parts) / sum(part[1] for part in parts)
    assert float(total) == pytest.approx(float(loss(outputs, targets)), rel=1e-6)
    loss_sum, weight = objective(outputs, {"targets": targets, "weights": torch.tensor([0.0, 1.0, 1.0])})
    assert float(loss_sum / weight) == pytest.approx(float(loss(outputs[1:], targets[1:])), rel=1e-6)
    one = objective(outputs[:, :1], {"targets": targets[:, 0]})
    assert float(one[0] / one[1]) == pytest.approx(float(loss(outputs[:, 0], targets[:, 0])), rel=1e-6)


def test_probabilities_as_targets_with_weights_of_samples() -> None:
    loss, targets = nn.CrossEntropyLoss(), LOGITS[:, 1].softmax(-1)
    batch = {"targets": targets, "weights": torch.tensor([0.0, 1.0, 1.0])}
    loss_sum, weight = as_objective(loss)(LOGITS[:, 0], batch)
    assert float(loss_sum / weight) == pytest.approx(float(loss(LOGITS[1:, 0], targets[1:])), rel=1e-6)


def test_probabilities_as_targets() -> None:
    loss, targets = nn.CrossEntropyLoss(label_smoothing=0.1), LOGITS[:, 1].softmax(-1)
    loss_sum, weight = as_objective(loss)(LOGITS[:, 0], {"targets": targets})
    assert float(loss_sum / weight) == pytest.approx(float(loss(LOGITS[:, 0], targets)), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "given", "nearest"),
    [
        (
            nn.CTCLoss(),
            "the objective CTCLoss with reduction='mean'",
            "a function (outputs, batch) -> (loss_sum, weight)",
        ),
        (
            nn.MSELoss(reduction="sum"),
            "the objective MSELoss with reduction='sum'",
            "reduction='mean', which is divided by the weight of the global batch",
        ),
    ],
)
def test_a_torch_loss_of_unknown_weight(tmp_path: Path, loss: nn.Module, given: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny.trainer(tmp_path / "run", objective=loss)
    assert text(raised) == [
        given,
        "a loss of torch.nn is a mean by one of BCELoss, BCEWithLogitsLoss, CrossEntropyLoss, HuberLoss, L1Loss, MSELoss, "
        "NLLLoss, SmoothL1Loss, SoftMarginLoss",
        "the weight of a micro-batch is not known, and nothing was started",
        nearest,
    ]
    assert not (tmp_path / "run").exists()


# --- runs ------------------------------------------------------------------------------------------------------------


class Pairs:
    """24 samples (x, y) of a plane, as a list of pairs has them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.sum()[None]


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def squared(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, batch["targets"])


@pytest.mark.parametrize("objective", [nn.MSELoss(), squared], ids=["nn", "mean"])
def test_sequential_on_pairs_with_a_mean_loss(tmp_path: Path, objective: Any) -> None:
    """Without a wrapper; the global batch of 8 in micro-batches of 8 and of 3 gives one curve, and a mean is noticed once."""

    def losses(name: str, micro_batch: int) -> list[float]:
        settings = {"network": sequential(), "data": Pairs(), "objective": objective, "steps": 5}
        return tiny.complete(tmp_path / name, micro_batch=micro_batch, **settings)["losses"]

    whole = losses("whole", 8)
    assert losses("parts", 3) == pytest.approx(whole, rel=1e-5)
    assert whole[-1] < whole[0]
    notices = [event for event in tiny.events(tmp_path / "parts") if event.get("code") == "mean_loss"]
    assert len(notices) == (objective is squared)
    if notices:
        assert (
            notices[0]["what"]
            == "the objective returns one number, taken as the mean over the samples of a micro-batch"
        )


def test_an_objective_by_name() -> None:
    assert as_objective("cross_entropy") is cross_entropy
    for wrong, shown, nearest in (("cross_entrpy", "'cross_entrpy'", "cross_entropy"), (None, "None", "a function")):
        with pytest.raises(ConfigError) as caught:
            as_objective(wrong)
        (problem,) = caught.value.problems
        assert problem.given == f"the objective {shown}"
        assert problem.rule.startswith("it is one of next_token, ")
        assert problem.consequence == "there is no loss, and nothing was started"
        assert nearest in problem.nearest


def test_an_objective_that_returns_a_vector() -> None:
    with pytest.raises(DataError) as raised:
        as_objective(lambda outputs, batch: outputs)(torch.zeros(3), {"inputs": torch.zeros(3)})
    assert text(raised)[:2] == [
        "an objective that returned a tensor [3]",
        "it returns (loss_sum, weight), two 0-dim tensors, or one 0-dim tensor, the mean of its micro-batch",
    ]


def returns_nothing(outputs: Any, batch: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (returns_nothing, "the objective returns_nothing, which returned None"),
        (lambda outputs, batch: (outputs.sum(),), "which returned (a tensor [],)"),
        (lambda outputs, batch: outputs.sum().item(), "which returned a float"),
        (lambda outputs, batch: (outputs.sum(), 3.0), "which returned (a tensor [], a float)"),
        (lambda outputs, batch: (outputs, outputs.sum()), "which returned (a tensor [3], a tensor [])"),
        (lambda outputs, batch: ({"loss": outputs.sum()}, None), "which returned (a dict, None)"),
        (lambda outputs, batch: "loss", "which returned a str"),
    ],
)
def test_an_objective_that_returns_no_pair(function: Any, given: str) -> None:
    with pytest.raises(DataError) as raised:
        as_objective(function)(torch.zeros(3), {"inputs": torch.zeros(3)})
    first, rule, consequence, nearest = text(raised)
    assert first.startswith("the objective ")
    assert first.endswith(given)
    assert rule == "it returns (loss_sum, weight), two 0-dim tensors, or one 0-dim tensor, the mean of its micro-batch"
    assert consequence == "there is no loss to train on"
    assert nearest == "end it with: return losses.sum(), torch.tensor(float(len(losses)))"


def test_an_objective_is_checked_once() -> None:
    """Later steps pay nothing for it, and get what the function returned."""
    pairs = iter([(torch.tensor(1.0), torch.tensor(2.0)), "later"])
    objective = as_objective(lambda outputs, batch: next(pairs))
    assert objective(None, {})[1] == 2
    assert objective(None, {}) == "later"  # type: ignore[comparison-overlap]


def test_an_objective_that_returns_nothing_ends_the_run_at_its_first_step(tmp_path: Path) -> None:
    data = [(torch.ones(3), torch.ones(1))] * 4
    run = Trainer(
        nn.Sequential(nn.Linear(3, 1)),
        data,
        PlanOptions(device="cpu", global_batch=2),
        objective=returns_nothing,  # pyright: ignore[reportArgumentType]
        options=TrainOptions(steps=3),
        run_dir=tmp_path,
    )
    with pytest.raises(DataError, match="the objective returns_nothing, which returned None"):
        run.fit()


# --- inputs of forward -----------------------------------------------------------------------------------------------


class Takes(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.forward = forward


@pytest.mark.parametrize(
    ("forward", "entries", "expected"),
    [
        (lambda tokens: 0, {"input_ids": 1, "targets": 2}, {"tokens": 1}),
        (
            lambda input_ids=None, attention_mask=None: 0,
            {"tokens": 1, "attention_mask": 3},
            {"input_ids": 1, "attention_mask": 3},
        ),
        (lambda tokens, input_ids: 0, {"tokens": 1, "input_ids": 2}, {"tokens": 1, "input_ids": 2}),
        (lambda x: 0, {"inputs": 1, "targets": 2}, {"x": 1}),
        (lambda x, mask=None: 0, {"inputs": 1, "mask": 2}, {"x": 1, "mask": 2}),
        (lambda **all: 0, {"a": 1, "b": 2}, {"a": 1, "b": 2}),
        (lambda tokens, **rest: 0, {"input_ids": 1, "b": 2}, {"tokens": 1, "b": 2}),
    ],
)
def test_entries_reach_forward(forward: Any, entries: dict[str, Any], expected: dict[str, Any]) -> None:
    assert input_selector(Takes(forward))(entries) == expected


@pytest.mark.parametrize(
    ("forward", "consequence"),
    [(lambda a=None, b=None: 0, "forward would get nothing of the batch"), (lambda a, b: 0, "forward would miss a, b")],
)
def test_a_batch_that_does_not_reach_forward(forward: Any, consequence: str) -> None:
    with pytest.raises(PlanError) as raised:
        input_selector(Takes(forward))({"inputs": torch.zeros(1), "targets": torch.zeros(1)})
    assert text(raised) == [
        "a batch with inputs, targets for Takes.forward(a, b)",
        "batch entries are passed to the parameters of the same name",
        consequence,
        "rename the parameter, or give the data set (or a transform) that entry",
    ]


# --- losses of the model itself --------------------------------------------------------------------------------------


class Labelled(tiny.RaggedTokens):
    """As for a causal model of transformers: labels are not shifted, and -100 behind the end of each text."""

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = super().read(indices)
        return {"input_ids": batch["tokens"], "labels": np.where(batch["weights"] > 0, batch["tokens"], -100)}


def causal() -> Any:
    transformers = pytest.importorskip(
        "transformers", reason="NOT CHECKED: the extra 'hf' (transformers) is not installed"
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=tiny.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True, use_cache=False,
        )
    )  # fmt: skip


def plain_losses(steps: int) -> list[float]:
    """Whole batches, in the order of the run, by transformers and torch alone."""
    from unisono.data.order.permutation import Permutation

    model, data = causal(), Labelled()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order, losses = Permutation(len(data), seed=0), []
    for step in range(steps):
        batch = {k: torch.from_numpy(v) for k, v in data.read(order(np.arange(8 * step, 8 * step + 8))).items()}
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def own_loss(world: Any, run_dir: str, changes: dict[str, Any]) -> list[float]:
    with tiny.trainer(
        run_dir, steps=4, world=world, network=causal(), data=Labelled(), objective=model_loss,
        kind="sgd", lr=0.1, momentum=0.0, weight_decay=0.0, clip_norm=0.0, **changes,
    ) as run:  # fmt: skip
        run.state.learning_rates = ScheduledRates(run.state.optimizer.param_groups, lambda step: 0.1, 4, 0.1)
        return [step.loss for step in run]


@pytest.mark.parametrize("micro_batch", [8, 4, 2, 3])
def test_a_loss_of_the_model_is_that_of_the_whole_batch(tmp_path: Path, micro_batch: int) -> None:
    from unisono.dist import JobSpec, World

    losses = own_loss(World(JobSpec()), str(tmp_path / "run"), {"micro_batch": micro_batch})
    assert losses == pytest.approx(plain_losses(4), rel=1e-5)


@pytest.mark.parametrize(
    "changes", [{"micro_batch": 1}, {"micro_batch": 2, "dp_shard": 2}, {"micro_batch": 4, "tp": 2}], ids=str
)
def test_a_loss_of_the_model_on_two_ranks(tmp_path: Path, pool: Pool, changes: dict[str, Any]) -> None:
    expected = plain_losses(4)
    for losses in pool.run(own_loss, str(tmp_path / "run"), changes, ranks=2):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_labels_that_do_not_count() -> None:
    """The weight is what the model's mean divides by; a micro-batch without any label adds nothing, and has a gradient of 0."""
    model, batch = causal(), {k: torch.from_numpy(v) for k, v in Labelled().read(np.arange(4)).items()}
    select = input_selector(model)
    assert float(model_loss(model(**select(batch)), batch)[1]) == int((batch["labels"][:, 1:] != -100).sum())
    weighted = batch | {"weights": torch.tensor([0.0, 1.0, 1.0, 0.0])}
    alone = {name: entry[1:3] for name, entry in batch.items()}
    found, expected = model_loss(model(**select(weighted)), weighted), model_loss(model(**select(alone)), alone)
    assert [float(part.detach()) for part in found] == pytest.approx(
        [float(part.detach()) for part in expected], rel=1e-6
    )
    nothing = batch | {"weights": torch.zeros(4)}
    loss_sum, weight = model_loss(model(**select(nothing)), nothing)
    loss_sum.backward()
    assert (float(loss_sum.detach()), float(weight)) == (0.0, 0.0)
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def test_a_loss_with_its_own_weight() -> None:
    loss_sum, weight = model_loss({"loss": torch.tensor(2.0), "weight": torch.tensor(3)}, {"x": torch.zeros(5)})
    assert (float(loss_sum), float(weight)) == (6.0, 3.0)


@pytest.mark.parametrize(
    ("outputs", "batch", "given"),
    [
        (LOGITS, {"x": LOGITS}, "a model that returned a tensor [3, 4, 5], for the objective model_loss"),
        ({"loss": torch.tensor(1.0)}, {"x": LOGITS}, "a loss of the model itself, for a batch with x"),
        (
            {"loss": torch.tensor(1.0)},
            {"labels": torch.zeros(3), "weights": torch.ones(3)},
            "labels that are floats, with weights, for a model that computes its own loss",
        ),
    ],
)
def test_a_loss_that_cannot_be_weighted(outputs: Any, batch: dict[str, Tensor], given: str) -> None:
    with pytest.raises(DataError) as raised:
        model_loss(outputs, batch)
    assert text(raised)[0] == given


def refused(world: Any, run_dir: str) -> str:
    with pytest.raises(PlanError) as raised, tiny.trainer(run_dir, world=world, objective=model_loss, cp=2):
        pass
    return str(raised.value)


def test_a_loss_of_the_model_on_a_part_of_a_sequence(tmp_path: Path, pool: Pool) -> None:
    for message in pool.run(refused, str(tmp_path / "run"), ranks=2):
        assert message == (
            "the objective model_loss with plan.cp=2\n"
            "  rule: a model that computes its own loss gets whole sequences of labels\n"
            "  so:   it would compare tokens with labels of other places; nothing was started\n"
            "  try:  the objective next_token with 'targets', or plan.cp=1"
        )


def test_class_weights_are_not_moved_away(tmp_path: Path) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(5))
    before = copy.deepcopy(loss)
    as_objective(loss)(LOGITS, {"targets": TARGETS})
    assert (loss.reduction, loss.weight.tolist()) == (before.reduction, before.weight.tolist())


def test_an_objective_by_its_name_is_that_objective_to_a_resumed_run(tmp_path: Path) -> None:
    def run(objective: Any) -> int:
        trainer = tiny_run(tmp_path, objective)
        with trainer:
            return len(list(trainer))

    assert run("cross_entropy") == 2
    assert run(cross_entropy) == 0
    with pytest.raises(CheckpointError, match="objective"):
        run(lambda outputs, batch: cross_entropy(outputs, batch))


def tiny_run(folder: Path, objective: Any) -> Trainer:
    return Trainer(
        nn.Linear(3, 2),
        [{"inputs": torch.ones(3), "targets": 1}] * 4,
        PlanOptions(device="cpu", precision="fp32", global_batch=2),
        objective=objective,
        optimizer=torch.optim.SGD,
        options=TrainOptions(steps=2, eval_every_steps=0),
        observe=ObserveOptions(console="off", trackers=(), report=False),
        run_dir=folder,
        resume="strict",
    )
