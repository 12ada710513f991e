"""A small transformer: clipping, MindSpore's AdamWeightDecay as an optimizer of one's own, a cosine.

python after.py FOLDER
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader

from unisono import PlanOptions, ScheduleOptions, Trainer, TrainOptions, from_map_style, initialize
from unisono.train import cross_entropy

VOCAB, LENGTH, WIDTH, HEADS, CLASSES, BATCH, EPOCHS = 24, 16, 32, 4, 3, 32, 4
NAMES = {"gamma": "weight", "beta": "bias", "embedding_table": "weight"}


def sentences(count, seed):
    """The class of a sentence is the token that it has most of, among the first three."""
    rng = np.random.RandomState(seed)
    labels = rng.randint(CLASSES, size=count)
    tokens = rng.randint(VOCAB, size=(count, LENGTH))
    for row, label in zip(tokens, labels, strict=True):
        row[rng.permutation(LENGTH)[:4]] = label
    return from_map_style(list(zip(tokens, labels, strict=True)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).reshape(-1, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        x = self.tokens(inputs) + self.places.weight
        return self.head(self.norm(self.block(x)).mean(1))


class AdamWeightDecay(torch.optim.Optimizer):
    """MindSpore's: AdamW without the correction of the moments' bias."""

    def __init__(self, params, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
                mean = state["mean"].lerp_(parameter.grad, 1 - group["beta1"])
                square = state["square"].lerp_(parameter.grad.square(), 1 - group["beta2"])
                update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter
                parameter.sub_(group["lr"] * update)


def main(folder):
    net = initialize(
        Classifier(),
        [
            {"match": "*.bias", "kind": "zeros"},
            {"match": "*norm*", "kind": "ones"},
            {"match": "*", "kind": "normal", "std": 0.1},
        ],
        seed=0,
    )
    if (folder / "start.safetensors").exists():  # the weights that before.py started from
        given = load_file(folder / "start.safetensors")
        stems = {name: name.rpartition(".")[::2] for name in given}
        net.load_state_dict({f"{stem}.{NAMES.get(leaf, leaf)}": given[name] for name, (stem, leaf) in stems.items()})
    adam, train = partial(AdamWeightDecay, lr=2e-3), sentences(160, seed=0)
    with Trainer(
        net,
        DataLoader(train, batch_size=BATCH),  # in order, as before
        PlanOptions(global_batch=BATCH, precision="fp32"),
        objective=cross_entropy,
        optimizer={"*norm*": adam, "*bias": adam, "*": partial(adam, weight_decay=0.05)},
        schedule=ScheduleOptions(kind="cosine", final_lr_frac=0.1),
        clip_norm=1.0,
        options=TrainOptions(epochs=EPOCHS),
        run_dir=folder / "run",
    ) as run:
        for step in run:
            if run.world.rank == 0:
                print(f"step {step.index} loss {step.loss:.7g}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
