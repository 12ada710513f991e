"""Tokens are tagged in a loop of Accelerate, with three groups of parameters and a schedule of torch."""

from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from unisono import PlanOptions, Trainer, TrainOptions

VOCABULARY, IGNORED, BATCH, EPOCHS, LR = 12, -100, 16, 3, 0.1


def sentences(count, seed):
    """Tokens [16], and for each whether a larger one stands right before it; what follows an end (0) has no label (-100)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (count, 16), generator=generator)
    lengths = torch.randint(8, 17, (count, 1), generator=generator)
    inside = torch.arange(16) < lengths
    labels = (tokens.roll(1, dims=1) > tokens).long()
    labels[:, 0] = 0
    return [
        {"tokens": t, "targets": y} for t, y in zip(tokens.where(inside, 0), labels.where(inside, IGNORED), strict=True)
    ]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.Sequential(
            nn.Conv1d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 32, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(32, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens).mT).mT)


def param_groups(model):
    """The embedding is not decayed, and the head learns five times as fast."""
    return [
        {"params": model.embedding.parameters(), "lr": LR, "weight_decay": 0.0},
        {"params": model.encoder.parameters(), "lr": LR, "weight_decay": 1e-3},
        {"params": model.head.parameters(), "lr": 5 * LR, "weight_decay": 1e-3},
    ]


def main():
    torch.manual_seed(0)
    model = Tagger()
    train = sentences(160, seed=1)
    epoch = len(train) // BATCH
    steps = EPOCHS * epoch
    with Trainer(
        model,
        train,
        PlanOptions(global_batch=BATCH, precision="fp32"),
        objective=nn.CrossEntropyLoss(ignore_index=IGNORED),
        optimizer=torch.optim.SGD(param_groups(model), momentum=0.9, nesterov=True),
        schedule=partial(OneCycleLR, max_lr=[LR, LR, 5 * LR], total_steps=steps),
        options=TrainOptions(steps=steps, eval_every_steps=epoch, num_eval_samples=0),
        eval_data=sentences(40, seed=2),
        metrics=["accuracy"],
    ) as run:
        run.fit()


if __name__ == "__main__":
    main()
