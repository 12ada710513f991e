"""Worker: the same GPT written for MindSpore, eager (PyNative) or as one compiled graph. Setting ``graph`` chooses.

Same mathematics, from the same initial weights: the parent compares its losses step by step with PyTorch's. The update is
MindSpore's fused Adam kernel after a decoupled decay, which is AdamW but for the place of eps (1e-8). MindSpore has no flash
attention and no chunked loss on the CPU: attention matrices and logits are whole, as its users write them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from benchmarks.peers.gate import Gate
from benchmarks.workload import Workload
from mindspore import Parameter, Tensor, nn, ops


class GPT(nn.Cell):
    """Shape letters as in unisono.models.gpt: B, T, D, H, K, E, V."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        sizes = workload.model
        self.heads, self.kv_heads, self.layers = sizes["num_heads"], sizes["num_kv_heads"], sizes["num_layers"]
        self.width = sizes["dim"] // sizes["num_heads"]
        self.eps = sizes["norm_eps"]
        exponent = np.arange(0, self.width, 2, dtype=np.float32) / self.width
        self.frequencies = Tensor(np.float32(sizes["rope_theta"]) ** -exponent)  # [E/2]
        self.weights = ms.ParameterTuple(
            [Parameter(Tensor(value), name=name.replace(".", "_")) for name, value in workload.weights.items()]
        )
        self.place = {name: index for index, name in enumerate(workload.weights)}
        self.multiply = ops.MatMul(transpose_b=True)
        self.scores = ops.BatchMatMul(transpose_b=True)

    def weight(self, name: str) -> Any:
        return self.weights[self.place[name]]

    def norm(self, x: Any, name: str) -> Any:
        return x * ops.rsqrt(ops.square(x).mean(-1, keep_dims=True) + self.eps) * self.weight(name)

    def split(self, x: Any, heads: int, batch: int) -> Any:
        return x.reshape(batch, -1, heads, self.width).transpose(0, 2, 1, 3)  # [B, heads, T, E]

    def rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        first, second = ops.split(x, self.width // 2, axis=-1)
        return x * cos + ops.concat((-second, first), axis=-1) * sin

    def construct(self, tokens: Any, targets: Any, weights: Any, positions: Any, documents: Any) -> Any:
        batch, length = tokens.shape
        angles = positions.astype(ms.float32).expand_dims(-1) * self.frequencies
        angles = ops.concat((angles, angles), axis=-1).expand_dims(1)  # [B, 1, T, E]
        cos, sin = ops.cos(angles), ops.sin(angles)
        same = ops.equal(documents.expand_dims(2), documents.expand_dims(1))
        causal = ops.tril(ops.ones((length, length), ms.float32))
        hidden = (1.0 - same.astype(ms.float32) * causal).expand_dims(1) * -1e9  # [B, 1, T, T]
        embedding = self.weight("embedding.weight")
        x = ops.gather(embedding, tokens.reshape(-1), 0)  # [B·T, D]
        for layer in range(self.layers):
            at = f"blocks.{layer}."
            h = self.norm(x, at + "attention_norm.weight")
            q = self.split(self.multiply(h, self.weight(at + "attention.q.weight")), self.heads, batch)
            k = self.split(self.multiply(h, self.weight(at + "attention.k.weight")), self.kv_heads, batch)
            v = self.split(self.multiply(h, self.weight(at + "attention.v.weight")), self.kv_heads, batch)
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
            if self.kv_heads != self.heads:
                k = ops.repeat_interleave(k, self.heads // self.kv_heads, 1)
                v = ops.repeat_interleave(v, self.heads // self.kv_heads, 1)
            attention = ops.softmax(self.scores(q, k) * self.width**-0.5 + hidden, -1)  # [B, H, T, T]
            mixed = ops.matmul(attention, v).transpose(0, 2, 1, 3).reshape(batch * length, -1)
            x = x + self.multiply(mixed, self.weight(at + "attention.out.weight"))
            h = self.norm(x, at + "ffn_norm.weight")
            gate = ops.silu(self.multiply(h, self.weight(at + "ffn.gate.weight")))
            h = gate * self.multiply(h, self.weight(at + "ffn.up.weight"))
            x = x + self.multiply(h, self.weight(at + "ffn.down.weight"))
        logits = self.multiply(self.norm(x, "norm.weight"), embedding)  # [B·T, V]
        losses = ops.cross_entropy(logits, targets.reshape(-1), reduction="none")
        weights = weights.reshape(-1)
        return (losses * weights).sum() / weights.sum()


class Training(nn.Cell):
    """One update, as a cell that graph mode compiles whole."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = GPT(workload)
        self.optim = workload.optim
        parameters = self.model.weights
        self.parameters = parameters
        self.decays = ["embedding" not in p.name and p.ndim > 1 for p in parameters]
        self.means = parameters.clone(prefix="mean", init="zeros")
        self.squares = parameters.clone(prefix="square", init="zeros")
        self.adam = ops.Adam()
        self.gradient = ms.value_and_grad(self.model, None, self.model.weights)

    def construct(
        self,
        tokens: Any,
        targets: Any,
        weights: Any,
        positions: Any,
        documents: Any,
        lr: Any,
        beta1_power: Any,
        beta2_power: Any,
    ) -> Any:
        # tensors one by one: a tuple of them would be a constant, and every step compiled anew
        loss, gradients = self.gradient(tokens, targets, weights, positions, documents)
        gradients = ops.clip_by_global_norm(gradients, self.optim["clip_norm"])
        beta1, beta2 = self.optim["betas"]
        for index in range(len(self.parameters)):
            p = self.parameters[index]
            if self.decays[index]:
                ops.assign(p, p * (1.0 - lr * self.optim["weight_decay"]))
            self.adam(
                p,
                self.means[index],
                self.squares[index],
                beta1_power,
                beta2_power,
                lr,
                beta1,
                beta2,
                self.optim["eps"],
                gradients[index],
            )
        return loss


def main() -> None:
    gate = Gate()
    settings = json.loads(sys.argv[1])
    ms.set_context(mode=ms.GRAPH_MODE if settings["graph"] else ms.PYNATIVE_MODE)
    ms.set_device("CPU")
    if settings["synchronous"]:  # operators one after the other: its asynchronous pipeline is slower on few cores
        ms.set_context(pynative_synchronize=True)
    if settings["threads"]:
        ms.set_context(runtime_num_threads=settings["threads"])
    workload = Workload.read(Path(settings["workload"]))
    training = Training(workload)
    dtypes = {"weights": np.float32}
    batches = [
        tuple(Tensor(array.astype(dtypes.get(name, np.int32))) for name, array in batch.items())
        for batch in workload.batches
    ]
    beta1, beta2 = workload.optim["betas"]
    gate.open(versions={"mindspore": ms.__version__}, threads=settings["threads"])
    for number, (batch, lr) in enumerate(zip(batches, workload.lrs, strict=True), start=1):
        powers = (Tensor(beta1**number, ms.float32), Tensor(beta2**number, ms.float32))
        loss = training(*batch, Tensor(lr, ms.float32), *powers)
        gate.step_done(lambda value=loss: float(value.asnumpy()))


if __name__ == "__main__":
    main()
