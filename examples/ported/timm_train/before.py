"""Image classification with mixup, label smoothing, an average of the weights, and cosine with warm-up."""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, BATCH, EPOCHS, WARMUP = 4, 32, 3, 4
LR, WEIGHT_DECAY, CLIP, EMA_DECAY = 3e-3, 0.05, 1.0, 0.9
MIXUP, SMOOTHING = 0.8, 0.1


def pictures(count, seed):
    """Waves in four directions, in noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    x, y = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    waves = torch.stack([torch.sin(x), torch.sin(y), torch.sin(x + y), torch.sin(x - y)])
    noise = torch.randn(count, 3, 12, 12, generator=generator)
    return TensorDataset(waves[labels].unsqueeze(1) + noise, labels)


class ConvNormAct(nn.Sequential):
    def __init__(self, channels_in, channels_out):
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(ConvNormAct(3, 16), ConvNormAct(16, 32))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images):
        return self.head(self.features(images).mean((2, 3)))


def mixup(images, labels):
    """Mix each image with its neighbour, and their smoothed targets alike."""
    smoothed = torch.full((len(labels), CLASSES), SMOOTHING / CLASSES)
    targets = smoothed.scatter(1, labels[:, None], 1 - SMOOTHING + SMOOTHING / CLASSES)
    lam = torch.as_tensor(np.random.beta(MIXUP, MIXUP, len(labels) // 2), dtype=torch.float32).repeat_interleave(2)

    def mix(values):
        neighbours = values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        share = lam.view(-1, *[1] * (values.dim() - 1))
        return share * values + (1 - share) * neighbours

    return mix(images), mix(targets)


class ModelEma:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for average, value in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(value, 1 - self.decay)
        for buffer, value in zip(self.module.buffers(), model.buffers(), strict=True):
            buffer.copy_(value)


def param_groups(model, weight_decay):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


def learning_rate(update, updates):
    if update < WARMUP:
        return LR * (update + 1) / WARMUP
    return LR * 0.5 * (1 + math.cos(math.pi * (update - WARMUP) / (updates - WARMUP)))


def train_one_epoch(model, ema, loader, optimizer, update, updates):
    model.train()
    for images, labels in loader:
        images, targets = mixup(images, labels)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update, updates)
        loss = torch.sum(-targets * F.log_softmax(model(images), dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        ema.update(model)
        update += 1
        print(f"step {update} loss {loss.item():.7f}")
    return update


@torch.no_grad()
def validate(model, loader):
    loss_sum, right, count = 0.0, 0, 0
    for images, labels in loader:
        logits = model(images)
        loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    print(f"held out: loss {loss_sum / count:.7f} accuracy {right / count:.7f}")


def main():
    torch.manual_seed(0)
    train_loader = DataLoader(pictures(272, seed=1), BATCH, shuffle=True, drop_last=True)
    eval_loader = DataLoader(pictures(100, seed=2), BATCH)
    model = Net()
    ema = ModelEma(model, EMA_DECAY)
    optimizer = torch.optim.AdamW(param_groups(model, WEIGHT_DECAY), lr=LR)
    update, updates = 0, EPOCHS * len(train_loader)
    for _ in range(EPOCHS):
        update = train_one_epoch(model, ema, train_loader, optimizer, update, updates)
        validate(ema.module, eval_loader)
    torch.save({"model": model.state_dict(), "ema": ema.module.state_dict()}, "last.pth")


if __name__ == "__main__":
    main()
