"""A small transformer in MindSpore's functional style: value_and_grad, clipping, AdamWeightDecay, a cosine.

python before.py FOLDER
"""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.common.initializer import Normal
from mindspore.dataset import NumpySlicesDataset

VOCAB, LENGTH, WIDTH, HEADS, CLASSES, BATCH, EPOCHS = 24, 16, 32, 4, 3, 32, 4


def sentences(count, seed):
    """The class of a sentence is the token that it has most of, among the first three."""
    rng = np.random.RandomState(seed)
    labels = rng.randint(CLASSES, size=count)
    tokens = rng.randint(VOCAB, size=(count, LENGTH))
    for row, label in zip(tokens, labels, strict=True):
        row[rng.permutation(LENGTH)[:4]] = label
    return tokens.astype(np.int32), labels.astype(np.int32)


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm((WIDTH,), epsilon=1e-5)
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH, weight_init=Normal(0.1))
        self.out = nn.Dense(WIDTH, WIDTH, weight_init=Normal(0.1))
        self.norm2 = nn.LayerNorm((WIDTH,), epsilon=1e-5)
        self.up = nn.Dense(WIDTH, 4 * WIDTH, weight_init=Normal(0.1))
        self.down = nn.Dense(4 * WIDTH, WIDTH, weight_init=Normal(0.1))
        self.gelu = nn.GELU(approximate=True)

    def construct(self, x):
        parts = self.qkv(self.norm1(x)).reshape(-1, LENGTH, 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
        scores = ops.matmul(parts[0], parts[1].swapaxes(-1, -2)) / (WIDTH // HEADS) ** 0.5
        mixed = ops.matmul(ops.softmax(scores, axis=-1), parts[2])
        x = x + self.out(mixed.transpose(0, 2, 1, 3).reshape(-1, LENGTH, WIDTH))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class Classifier(nn.Cell):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH, embedding_table=Normal(0.1))
        self.places = nn.Embedding(LENGTH, WIDTH, embedding_table=Normal(0.1))
        self.block = Block()
        self.norm = nn.LayerNorm((WIDTH,), epsilon=1e-5)
        self.head = nn.Dense(WIDTH, CLASSES, weight_init=Normal(0.1))

    def construct(self, inputs):
        x = self.tokens(inputs) + self.places(ops.arange(LENGTH))
        return self.head(self.norm(self.block(x)).mean(1))


def main(folder):
    ms.set_seed(0)
    net = Classifier()
    ms.save_checkpoint(net, str(folder / "start.safetensors"), format="safetensors")
    data = NumpySlicesDataset(sentences(160, seed=0), ["inputs", "targets"], shuffle=False).batch(BATCH)
    steps = EPOCHS * data.get_dataset_size()
    plain = [p for p in net.trainable_params() if "norm" in p.name or "bias" in p.name]
    decayed = [p for p in net.trainable_params() if "norm" not in p.name and "bias" not in p.name]
    optimizer = nn.AdamWeightDecay(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        learning_rate=nn.CosineDecayLR(min_lr=2e-4, max_lr=2e-3, decay_steps=steps),
        beta1=0.9,
        beta2=0.999,
        eps=1e-6,
    )
    loss_function = nn.CrossEntropyLoss()

    def forward(inputs, targets):
        return loss_function(net(inputs), targets)

    value_and_grad = ms.value_and_grad(forward, None, optimizer.parameters)

    def train_step(inputs, targets):
        loss, gradients = value_and_grad(inputs, targets)
        optimizer(ops.clip_by_global_norm(gradients, 1.0))
        return loss

    step = 0
    net.set_train()
    for _ in range(EPOCHS):
        for inputs, targets in data.create_tuple_iterator():
            loss = train_step(inputs, targets)
            step += 1
            print(f"step {step} loss {float(loss.asnumpy()):.7g}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
