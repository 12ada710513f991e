"""A vision transformer is fine-tuned: the patch embedding is frozen, and earlier blocks learn more slowly."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def layer_of(name):
    """0 for the embeddings, 1 to DEPTH for the blocks, DEPTH + 1 for the head."""
    if name.startswith(("patch_embed", "pos_embed")):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks.") else DEPTH + 1


def param_groups_layer_decay(model):
    groups = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = layer_of(name)
        decays = parameter.ndim > 1 and name != "pos_embed"
        group = groups.setdefault(
            (layer, decays),
            {
                "params": [],
                "lr": LR * LAYER_DECAY ** (DEPTH + 1 - layer),
                "weight_decay": WEIGHT_DECAY if decays else 0.0,
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


@torch.no_grad()
def validate(model, loader):
    model.eval()
    loss_sum, right, count = 0.0, 0, 0
    for images, labels in loader:
        logits = model(images)
        loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    print(f"held out: cross_entropy {loss_sum / count:.7f} accuracy {right / count:.7f}")


def main():
    torch.manual_seed(0)
    train_loader = DataLoader(pictures(240, seed=1), BATCH, shuffle=True)
    eval_loader = DataLoader(pictures(90, seed=2), BATCH)
    model = VisionTransformer(num_classes=5)
    model.load_state_dict(pretrained(), strict=False)
    for parameter in model.patch_embed.parameters():
        parameter.requires_grad = False
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(param_groups_layer_decay(model), lr=LR)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train_loader))
    update = 0
    for _ in range(EPOCHS):
        model.train()
        for images, labels in train_loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            update += 1
            print(f"step {update} loss {loss.item():.7f}")
        validate(model, eval_loader)
    torch.save(model.state_dict(), "finetuned.pth")


if __name__ == "__main__":
    main()
