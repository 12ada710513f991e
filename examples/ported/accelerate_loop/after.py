"""A recurrent network in a loop of Accelerate, with gradient accumulation and clipping."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from unisono import CheckpointOptions, PlanOptions, Trainer, TrainOptions

MICRO_BATCH, ACCUMULATION, EPOCHS, LR = 8, 4, 2, 5e-3


def sequences(count, seed):
    """Sums of two waves; the target is the ratio of their frequencies."""
    generator = torch.Generator().manual_seed(seed)
    slow, fast = 0.1 + torch.rand(2, count, 1, generator=generator)
    time = torch.arange(24.0)
    values = torch.sin(slow * time) + torch.sin(3 * fast * time)
    return TensorDataset(values.unsqueeze(-1), fast / slow)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, values):
        return self.head(self.gru(values)[0][:, -1])


def main():
    torch.manual_seed(0)
    model = Net()
    train = sequences(320, seed=1)
    batch = MICRO_BATCH * ACCUMULATION
    epoch = len(train) // batch
    with Trainer(
        model,
        train,
        PlanOptions(global_batch=batch, micro_batch=MICRO_BATCH, precision="fp32"),
        objective=nn.SmoothL1Loss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=LR),
        clip_norm=1.0,
        options=TrainOptions(epochs=EPOCHS, eval_every_steps=epoch, num_eval_samples=0),
        checkpoint=CheckpointOptions(every_steps=epoch),
        eval_data=sequences(50, seed=2),
    ) as run:
        run.fit()


if __name__ == "__main__":
    main()
