"""A vision transformer is fine-tuned: the patch embedding is frozen, and earlier blocks learn more slowly."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from unisono import Metric, OptimOptions, PlanOptions, ScheduleOptions, Trainer, TrainOptions

BATCH, EPOCHS, DEPTH = 24, 2, 3
LR, LAYER_DECAY, WEIGHT_DECAY = 2e-3, 0.65, 0.05


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = (
            nn.LayerNorm(dim),
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)),
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, num_classes, dim=32):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, stride=4)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 9, dim))
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def pictures(count, seed):
    """Spots in one of five places, in noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (count,), generator=generator)
    images = torch.randn(count, 3, 12, 12, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 2 * label : 2 * label + 3, 2 * label : 2 * label + 3] += 2
    return TensorDataset(images, labels)


def pretrained():
    """What a checkpoint of 10 classes would hold; the new head is the model's own."""
    torch.manual_seed(1)
    state = VisionTransformer(num_classes=10).state_dict()
    return {name: value for name, value in state.items() if not name.startswith("head.")}


def plain_loss(outputs, batch, loss_sum, weight):
    """The loss of an evaluation is that of the training, which smooths labels; this one does not."""
    losses = F.cross_entropy(outputs, batch["targets"], reduction="sum")
    return torch.stack([losses, torch.tensor(len(outputs))]).double()


def main():
    torch.manual_seed(0)
    model = VisionTransformer(num_classes=5)
    model.load_state_dict(pretrained(), strict=False)
    blocks = [{"match": f"blocks.{n}.*", "lr_scale": LAYER_DECAY ** (DEPTH - n)} for n in range(DEPTH)]
    train = pictures(240, seed=1)
    epoch = len(train) // BATCH
    with Trainer(
        model,
        train,
        PlanOptions(global_batch=BATCH, precision="fp32"),
        objective=nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=OptimOptions(
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            decay_exclude=("pos_embed",),
            groups=(*blocks, {"match": "pos_embed", "lr_scale": LAYER_DECAY ** (DEPTH + 1)}),
            freeze=("patch_embed.*",),
            beta2=0.999,
            clip_norm=0.0,
        ),
        schedule=ScheduleOptions(final_lr_frac=0.0),
        options=TrainOptions(epochs=EPOCHS, eval_every_steps=epoch, num_eval_samples=0),
        eval_data=pictures(90, seed=2),
        metrics={
            "accuracy": "accuracy",
            "cross_entropy": Metric(size=2, sums=plain_loss, value=lambda total: total[0] / total[1]),
        },
    ) as run:
        run.fit()


if __name__ == "__main__":
    main()
