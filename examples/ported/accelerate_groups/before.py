"""Tokens are tagged in a loop of Accelerate, with three groups of parameters and a schedule of torch."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

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
        {"tokens": t, "labels": y} for t, y in zip(tokens.where(inside, 0), labels.where(inside, IGNORED), strict=True)
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


def evaluate(accelerator, model, loader):
    model.eval()
    right, count = 0, 0
    for batch in loader:
        with torch.no_grad():
            predictions = model(batch["tokens"]).argmax(-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, batch["labels"]))
        right += ((predictions == labels) & (labels != IGNORED)).sum().item()
        count += (labels != IGNORED).sum().item()
    accelerator.print(f"held out: accuracy {right / count:.7f}")


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = Tagger()
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORED)
    train_loader = DataLoader(sentences(160, seed=1), BATCH, shuffle=True)
    eval_loader = DataLoader(sentences(40, seed=2), BATCH)
    optimizer = torch.optim.SGD(param_groups(model), momentum=0.9, nesterov=True)
    scheduler = OneCycleLR(optimizer, max_lr=[LR, LR, 5 * LR], total_steps=EPOCHS * len(train_loader))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    update = 0
    for _ in range(EPOCHS):
        model.train()
        for batch in train_loader:
            logits = model(batch["tokens"])
            loss = criterion(logits.flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            update += 1
            accelerator.print(f"step {update} loss {loss.item():.7f}")
        evaluate(accelerator, model, eval_loader)
    accelerator.save_model(model, "model")


if __name__ == "__main__":
    main()
