"""A recurrent network in a loop of Accelerate, with gradient accumulation and clipping."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    set_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    train_loader = DataLoader(sequences(320, seed=1), MICRO_BATCH, shuffle=True)
    eval_loader = DataLoader(sequences(50, seed=2), MICRO_BATCH)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    update, total = 0, 0.0
    for _ in range(EPOCHS):
        model.train()
        for values, ratios in train_loader:
            with accelerator.accumulate(model):
                loss = F.smooth_l1_loss(model(values), ratios)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean").item() / ACCUMULATION
            if accelerator.sync_gradients:
                update += 1
                accelerator.print(f"step {update} loss {total:.7f}")
                total = 0.0
        model.eval()
        errors = []
        for values, ratios in eval_loader:
            with torch.no_grad():
                predictions = model(values)
            predictions, ratios = accelerator.gather_for_metrics((predictions, ratios))
            errors.append(F.smooth_l1_loss(predictions, ratios, reduction="none"))
        accelerator.print(f"held out: loss {torch.cat(errors).mean():.7f}")
        accelerator.save_state("checkpoint")


if __name__ == "__main__":
    main()
