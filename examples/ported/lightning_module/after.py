"""A network predicts a number and how sure it is."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from unisono import CheckpointOptions, Metric, PlanOptions, Trainer, TrainOptions


def houses(count, seed):
    """Rows of a table [8], and a number whose noise grows with the first column."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(count, 8, generator=generator)
    noise = torch.randn(count, generator=generator) * (0.05 + 0.3 * rows[:, 0])
    return TensorDataset(rows, (3 * rows[:, 1] * rows[:, 2] - rows[:, 3] + noise).unsqueeze(1))


class Estimator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, rows):
        mean, spread = self.layers(rows).chunk(2, dim=1)
        return mean, F.softplus(spread) + 1e-3


def nll(outputs, batch):
    mean, variance = outputs
    losses = F.gaussian_nll_loss(mean, batch["targets"], variance, reduction="none")
    return losses.sum(), torch.tensor(float(len(losses)))


def absolute_errors(outputs, batch, loss_sum, weight):
    return torch.stack([(outputs[0] - batch["targets"]).abs().sum(), weight]).double()


def main():
    torch.manual_seed(0)
    train = houses(256, seed=1)
    epoch = len(train) // 32
    with Trainer(
        Estimator(),
        train,
        PlanOptions(global_batch=32, precision="fp32"),
        objective=nll,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        schedule=partial(OneCycleLR, max_lr=1e-2, total_steps=3 * epoch),
        clip_norm=0.5,
        options=TrainOptions(epochs=3, eval_every_steps=epoch),
        checkpoint=CheckpointOptions(every_steps=epoch, keep_last=1),
        eval_data=houses(100, seed=2),
        metrics={"mae": Metric(size=2, sums=absolute_errors, value=lambda total: total[0] / total[1])},
    ) as run:
        run.fit()


if __name__ == "__main__":
    main()
