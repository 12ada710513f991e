"""Two spirals are told apart: torchrun --nproc-per-node=2 before.py"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, EPOCHS, LR, CHECKPOINT = 64, 4, 0.05, "checkpoint.pt"


class Spirals(Dataset):
    """Points of two spirals, and which spiral each is of."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count,), generator=generator)
        radius = torch.rand(count, generator=generator)
        angle = 5 * radius + math.pi * self.labels
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = points + 0.02 * torch.randn(count, 2, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 2)
    )


def mean_over_ranks(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model, loader):
    """Every rank evaluates its part of the samples."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for points, labels in loader:
        logits = model(points)
        losses = nn.functional.cross_entropy(logits, labels, reduction="sum")
        sums += torch.stack([losses, (logits.argmax(-1) == labels).sum(), torch.tensor(len(labels))])
    dist.all_reduce(sums)
    loss, accuracy = (sums[:2] / sums[2]).tolist()
    if dist.get_rank() == 0:
        print(f"held out: loss {loss:.7f} accuracy {accuracy:.7f}")


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    train, held_out = Spirals(512, seed=1), Spirals(128, seed=2)
    train_sampler = DistributedSampler(train, shuffle=True)
    train_loader = DataLoader(train, BATCH // ranks, sampler=train_sampler)
    eval_loader = DataLoader(held_out, BATCH, sampler=DistributedSampler(held_out, shuffle=False))
    model = DistributedDataParallel(build_model())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3], gamma=0.1)
    first_epoch, update = 0, 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch, update = state["epoch"], state["update"]
    for epoch in range(first_epoch, EPOCHS):
        train_sampler.set_epoch(epoch)
        model.train()
        for points, labels in train_loader:
            loss = criterion(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update += 1
            mean_loss = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {update} loss {mean_loss:.7f}")
        scheduler.step()
        evaluate(model, eval_loader)
        if rank == 0:
            torch.save(
                {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch + 1,
                    "update": update,
                },
                CHECKPOINT,
            )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
