"""Image classification with mixup, label smoothing, an average of the weights, and cosine with warm-up."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unisono import LoaderOptions, OptimOptions, PlanOptions, ScheduleOptions, Trainer, TrainOptions

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


def smooth(sample, rng):
    target = np.full(CLASSES, SMOOTHING / CLASSES, np.float32)
    target[sample["targets"]] += 1 - SMOOTHING
    return {"inputs": sample["inputs"], "targets": target}


def mixup(one, other, rng):
    """Mix each image with its neighbour, and their smoothed targets alike."""
    lam = np.float32(rng.beta(MIXUP, MIXUP))
    return tuple({name: lam * a[name] + (1 - lam) * b[name] for name in a} for a, b in ((one, other), (other, one)))


def main():
    torch.manual_seed(0)
    train = pictures(272, seed=1)
    epoch = len(train) // BATCH
    with Trainer(
        Net(),
        train,
        PlanOptions(global_batch=BATCH, precision="fp32"),
        objective="cross_entropy",
        optimizer=OptimOptions(lr=LR, weight_decay=WEIGHT_DECAY, beta2=0.999, clip_norm=CLIP),
        schedule=ScheduleOptions(warmup_steps=WARMUP, final_lr_frac=0.0),
        options=TrainOptions(epochs=EPOCHS, eval_every_steps=epoch, num_eval_samples=0, ema_decay=EMA_DECAY),
        eval_data=pictures(100, seed=2),
        metrics=["accuracy"],
        transform=smooth,
        pair_transform=mixup,
        loader=LoaderOptions(last_batch="drop"),
    ) as run:
        run.fit()


if __name__ == "__main__":
    main()
