"""Make tests/interop/models: small models of MXNet 1.9.1 and MindSpore 2.10, and their outputs for one input (NAME.npz).

$UNISONO_MXNET_PYTHON tests/peers/make_model_fixtures.py mxnet tests/interop/models
$UNISONO_MINDSPORE_PYTHON tests/peers/make_model_fixtures.py mindspore tests/interop/models

The networks of Gluon's model zoo are its own. Those of GluonCV, GluonNLP, mindspore/models, MindCV and MindFormers, whose
versions or dependencies do not go with these, are built of the framework's layers under the names of their parameters.
"""

import math
import sys
from pathlib import Path

import numpy as np

SEED = 0
WIDTH, HEADS, INNER, VOCABULARY, POSITIONS, LAYERS = 16, 4, 24, 31, 12, 2
TOKENS = np.random.RandomState(1).randint(0, VOCABULARY, (2, 7)).astype(np.int32)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]], np.int32)
LENGTHS = np.array([7, 4], np.int32)  # tokens of each text that are not padding


def value(name: str, shape: tuple, chance: np.random.RandomState) -> np.ndarray:
    """Values that make all parts of a model matter."""
    if name.endswith(("var", "variance")):
        return chance.uniform(0.5, 2, shape).astype(np.float32)
    if name.endswith("gamma") or (len(shape) == 1 and name.endswith("norm.weight")):
        return chance.uniform(0.5, 1.5, shape).astype(np.float32)
    if len(shape) == 2 and ("embed" in name or "position" in name):  # small, so that the epsilon of a norm shows
        return (0.01 * chance.randn(*shape)).astype(np.float32)
    fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else 16
    return (chance.randn(*shape) / math.sqrt(fan_in)).astype(np.float32)


def image(side: int) -> np.ndarray:
    return np.random.RandomState(side).randn(2, 3, side, side).astype(np.float32)


def mxnet(folder: Path) -> None:
    np.bool = bool  # type: ignore[attr-defined]
    import mxnet as mx
    from mxnet import nd
    from mxnet.gluon import nn

    zoo = mx.gluon.model_zoo.vision

    def fill(net: mx.gluon.Block, *inputs: mx.nd.NDArray) -> None:
        net.initialize()
        net(*inputs)
        chance = np.random.RandomState(SEED)
        names = {parameter: name for name, parameter in reversed(net._collect_params_with_prefix().items())}
        for parameter, name in names.items():  # a shared one under its first name
            parameter.set_data(nd.array(value(name, parameter.shape, chance)))

    def save(name: str, net: mx.gluon.Block, **outputs: mx.nd.NDArray) -> None:
        net.save_parameters(str(folder / f"{name}.params"))
        np.savez(folder / f"{name}.npz", **{key: array.asnumpy() for key, array in outputs.items()})

    for kind, block, channels in (
        ("bottleneck", zoo.BottleneckV1, [4, 8, 16, 24]),
        ("basic", zoo.BasicBlockV1, [4, 4, 6, 8]),
    ):
        net = zoo.ResNetV1(block, [2, 2, 1], channels, classes=5, prefix="resnetv10_")
        pixels = nd.array(image(32))
        fill(net, pixels)
        net.hybridize()
        save(f"gluon_resnet_{kind}", net, logits32=net(pixels))
        net.export(str(folder / f"gluon_exported_{kind}"))
        (folder / f"gluon_exported_{kind}-symbol.json").unlink()
        (folder / f"gluon_exported_{kind}-0000.params").rename(folder / f"gluon_exported_{kind}.params")

    class BlockV1b(nn.Block):
        def __init__(self, width: int, stride: int, bottleneck: bool, projects: bool) -> None:
            super().__init__()
            self.kernels = (1, 3, 1) if bottleneck else (3, 3)
            out = 4 * width if bottleneck else width
            for number, kernel in enumerate(self.kernels, 1):
                step = stride if number == (2 if bottleneck else 1) else 1
                channels = out if number == len(self.kernels) else width
                setattr(
                    self,
                    f"conv{number}",
                    nn.Conv2D(channels, kernel, step, kernel // 2, use_bias=False),
                )
                setattr(self, f"bn{number}", nn.BatchNorm())
            self.downsample = None
            if projects:
                self.downsample = nn.Sequential()
                self.downsample.add(nn.Conv2D(out, 1, stride, use_bias=False), nn.BatchNorm())

        def forward(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
            y = x
            for number in range(1, len(self.kernels) + 1):
                y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
                y = nd.relu(y) if number < len(self.kernels) else y
            return nd.relu(y + (x if self.downsample is None else self.downsample(x)))

    class ResNetV1b(nn.Block):
        def __init__(self, bottleneck: bool) -> None:
            super().__init__()
            self.conv1 = nn.Conv2D(4, 7, 2, 3, use_bias=False)
            self.bn1 = nn.BatchNorm()
            self.maxpool = nn.MaxPool2D(3, 2, 1)
            for stage in range(3):
                layer = nn.Sequential()
                for number in range(2 if stage == 0 else 1):
                    stride = 2 if stage and number == 0 else 1
                    projects = number == 0 and (bottleneck or stage > 0)
                    layer.add(BlockV1b((2 if bottleneck else 4) * (stage + 1), stride, bottleneck, projects))
                setattr(self, f"layer{stage + 1}", layer)
            self.fc = nn.Dense(5)

        def forward(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
            x = self.maxpool(nd.relu(self.bn1(self.conv1(x))))
            x = self.layer3(self.layer2(self.layer1(x)))
            return self.fc(x.mean((2, 3)))

    net = ResNetV1b(bottleneck=True)
    pixels = nd.array(image(32))
    fill(net, pixels)
    save("gluoncv_resnet_v1b", net, logits32=net(pixels))

    def heads(x: mx.nd.NDArray) -> mx.nd.NDArray:
        """[B, T, D] → [B · H, T, D / H]."""
        return x.reshape((0, 0, HEADS, -1)).transpose((0, 2, 1, 3)).reshape((-3, 0, 0))

    def attend(q: mx.nd.NDArray, k: mx.nd.NDArray, v: mx.nd.NDArray, hidden: np.ndarray) -> mx.nd.NDArray:
        """``hidden`` [B, T or 1, T] is 1 at keys that are not seen."""
        scores = nd.batch_dot(heads(q), heads(k), transpose_b=True) / math.sqrt(WIDTH // HEADS)
        mask = nd.array(np.repeat(np.broadcast_to(hidden, (len(TOKENS), q.shape[1], q.shape[1])), HEADS, 0))
        mixed = nd.batch_dot(nd.softmax(scores - 1e9 * mask), heads(v))
        return mixed.reshape((-4, -1, HEADS, 0, 0)).transpose((0, 2, 1, 3)).reshape((0, 0, -3))

    def dense(out: int, activation: str | None = None) -> nn.Dense:
        return nn.Dense(out, flatten=False, activation=activation)

    class AttentionCell(nn.Block):
        def __init__(self) -> None:
            super().__init__()
            self.proj_query, self.proj_key, self.proj_value = dense(WIDTH), dense(WIDTH), dense(WIDTH)

        def forward(self, x: mx.nd.NDArray, hidden: np.ndarray) -> mx.nd.NDArray:
            return attend(self.proj_query(x), self.proj_key(x), self.proj_value(x), hidden)

    class FFN(nn.Block):
        def __init__(self) -> None:
            super().__init__()
            self.ffn_1, self.ffn_2, self.layer_norm = dense(INNER), dense(WIDTH), nn.LayerNorm(epsilon=1e-12)

        def forward(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
            return self.layer_norm(x + self.ffn_2(nd.LeakyReLU(self.ffn_1(x), act_type="gelu")))

    class Cell(nn.Block):
        def __init__(self) -> None:
            super().__init__()
            self.attention_cell, self.proj, self.ffn = AttentionCell(), dense(WIDTH), FFN()
            self.layer_norm = nn.LayerNorm(epsilon=1e-12)

        def forward(self, x: mx.nd.NDArray, hidden: np.ndarray) -> mx.nd.NDArray:
            return self.ffn(self.layer_norm(x + self.proj(self.attention_cell(x, hidden))))

    class Encoder(nn.Block):
        def __init__(self) -> None:
            super().__init__()
            self.position_weight = self.params.get("position_weight", shape=(POSITIONS, WIDTH))
            self._reg_params = {"position_weight": self.position_weight}
            self.layer_norm = nn.LayerNorm(epsilon=1e-12)
            self.transformer_cells = nn.Sequential()
            self.transformer_cells.add(*(Cell() for _ in range(LAYERS)))

        def forward(self, x: mx.nd.NDArray, hidden: np.ndarray) -> mx.nd.NDArray:
            x = self.layer_norm(x + self.position_weight.data()[: x.shape[1]].expand_dims(0))
            for cell in self.transformer_cells:
                x = cell(x, hidden)
            return x

    def embedding(rows: int) -> nn.Sequential:
        table = nn.Sequential()
        table.add(nn.Embedding(rows, WIDTH))
        return table

    class BERTModel(nn.Block):
        def __init__(self, *, has_heads: bool) -> None:
            super().__init__()
            self.word_embed, self.token_type_embed = embedding(VOCABULARY), embedding(2)
            self.encoder = Encoder()
            self.pooler = dense(WIDTH, "tanh")
            self.has_heads = has_heads
            if has_heads:
                self.classifier = dense(2)
                self.decoder = nn.Sequential()
                self.decoder.add(dense(WIDTH), nn.GELU(), nn.LayerNorm(epsilon=1e-12))
                self.decoder.add(nn.Dense(VOCABULARY, flatten=False, params=self.word_embed[0].params))

        def forward(self, tokens: mx.nd.NDArray, segments: mx.nd.NDArray, hidden: np.ndarray) -> tuple:
            x = self.encoder(self.word_embed(tokens) + self.token_type_embed(segments), hidden)
            pooled = self.pooler(x[:, 0])
            return (x, pooled, self.classifier(pooled), self.decoder(x)) if self.has_heads else (x, pooled)

    class BERTClassifier(nn.Block):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BERTModel(has_heads=False)
            self.classifier = nn.Sequential()
            self.classifier.add(nn.Dropout(0.1), nn.Dense(3))

        def forward(self, *inputs: object) -> mx.nd.NDArray:
            return self.classifier(self.bert(*inputs)[1])

    tokens, segments = nd.array(TOKENS), nd.array(SEGMENTS)
    hidden = np.arange(TOKENS.shape[1])[None, None] >= LENGTHS[:, None, None]
    net = BERTModel(has_heads=True)
    fill(net, tokens, segments, hidden)
    states, pooled, following, masked = net(tokens, segments, hidden)
    save("gluonnlp_bert", net, states=states, pooled=pooled, following=following, masked=masked)
    net = BERTClassifier()
    fill(net, tokens, segments, hidden)
    save("gluonnlp_bert_classifier", net, logits=net(tokens, segments, hidden))

    class SelfAttention(nn.Block):
        def __init__(self) -> None:
            super().__init__()
            self._multi_head_qkv_proj, self._out_proj = dense(3 * WIDTH), dense(WIDTH)

        def forward(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
            q, k, v = nd.split(self._multi_head_qkv_proj(x), 3, axis=-1)
            return self._out_proj(attend(q, k, v, np.triu(np.ones((1, x.shape[1], x.shape[1])), 1)))

    class FeedForward(nn.Block):
        def __init__(self) -> None:
            super().__init__()
            self._hidden_map, self._out_map = dense(4 * WIDTH), dense(WIDTH)

        def forward(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
            x = self._hidden_map(x)
            x = 0.5 * x * (1 + nd.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
            return self._out_map(x)

    class GPT2Model(nn.Block):
        def __init__(self) -> None:
            super().__init__()
            self._pos_embed, self._embed = nn.Embedding(POSITIONS, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
            self._logits_proj = nn.Dense(VOCABULARY, use_bias=False, flatten=False, params=self._embed.params)
            for name, kind in (
                ("_self_attention_layers", SelfAttention),
                ("_ffn_layers", FeedForward),
                ("_attn_ln", nn.LayerNorm),
                ("_ffn_ln", nn.LayerNorm),
            ):
                setattr(self, name, nn.Sequential())
                getattr(self, name).add(*(kind() for _ in range(LAYERS)))
            self._final_ln = nn.LayerNorm()

        def forward(self, tokens: mx.nd.NDArray) -> mx.nd.NDArray:
            x = self._embed(tokens) + self._pos_embed(nd.arange(tokens.shape[1])).expand_dims(0)
            for layer in range(LAYERS):
                x = x + self._self_attention_layers[layer](self._attn_ln[layer](x))
                x = x + self._ffn_layers[layer](self._ffn_ln[layer](x))
            return self._logits_proj(self._final_ln(x))

    net = GPT2Model()
    fill(net, tokens)
    save("gluonnlp_gpt2", net, logits=net(tokens))


def mindspore(folder: Path) -> None:
    import mindspore as ms
    from mindspore import nn, ops

    def fill(net: nn.Cell) -> nn.Cell:
        chance = np.random.RandomState(SEED)
        for name, parameter in net.parameters_and_names():
            parameter.set_data(ms.Tensor(value(name, parameter.shape, chance)))
        return net.set_train(False)

    def save(name: str, saved: nn.Cell, **outputs: object) -> None:
        ms.save_checkpoint(saved, str(folder / f"{name}.ckpt"))
        arrays = {key: array if isinstance(array, np.ndarray) else array.asnumpy() for key, array in outputs.items()}
        np.savez(folder / f"{name}.npz", **arrays)

    class Block(nn.Cell):
        """A block; ``names`` are a norm's and a projection's, ``even`` is padding on both sides, else as pad_mode "same"."""

        def __init__(
            self, before: int, width: int, stride: int, bottleneck: bool, names: tuple, eps: tuple, even: bool
        ):
            super().__init__()
            self.kernels = (1, 3, 1) if bottleneck else (3, 3)
            self.norm = names[0]
            out = 4 * width if bottleneck else width
            channels = before
            for number, kernel in enumerate(self.kernels, 1):
                step = stride if number == (2 if bottleneck else 1) else 1
                to = out if number == len(self.kernels) else width
                padding = {"pad_mode": "pad", "padding": kernel // 2} if even else {"pad_mode": "same"}
                setattr(self, f"conv{number}", nn.Conv2d(channels, to, kernel, step, **padding))
                setattr(self, self.norm.format(number), nn.BatchNorm2d(to, eps=eps[0]))
                channels = to
            self.projection = names[1] if stride != 1 or before != out else ""
            if self.projection:
                layers = [nn.Conv2d(before, out, 1, stride), nn.BatchNorm2d(out, eps=eps[1])]
                setattr(self, self.projection, nn.SequentialCell(layers))

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            y = x
            for number in range(1, len(self.kernels) + 1):
                y = getattr(self, self.norm.format(number))(getattr(self, f"conv{number}")(y))
                y = ops.relu(y) if number < len(self.kernels) else y
            return ops.relu(y + (getattr(self, self.projection)(x) if self.projection else x))

    class ResNet(nn.Cell):
        def __init__(self, bottleneck: bool, names: tuple, eps: tuple, even: tuple, head: str, depths: tuple):
            """``eps`` are of branches, projections and the stem; ``even`` of blocks, of the stem and of the pooling."""
            super().__init__()
            padding = {"pad_mode": "pad", "padding": 3} if even[1] else {"pad_mode": "same"}
            self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, 2, **padding), nn.BatchNorm2d(4, eps=eps[2])
            self.pads, self.depths, self.head = even[2], depths, head
            self.pad = nn.Pad(((0, 0), (0, 0), (1, 1), (1, 1)))
            self.pool = nn.MaxPool2d(3, 2, "valid" if even[2] else "same")
            before = 4
            for stage, depth in enumerate(depths):
                blocks = []
                for number in range(depth):
                    width = (2 if bottleneck else 4) * (stage + 1)
                    stride = 2 if stage and number == 0 else 1
                    blocks.append(Block(before, width, stride, bottleneck, names, eps, even[0]))
                    before = 4 * width if bottleneck else width
                setattr(self, f"layer{stage + 1}", nn.SequentialCell(blocks))
            setattr(self, head, nn.Dense(before, 5))

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            x = ops.relu(self.bn1(self.conv1(x)))
            x = self.pool(self.pad(x) if self.pads else x)
            for stage in range(len(self.depths)):
                x = getattr(self, f"layer{stage + 1}")(x)
            return getattr(self, self.head)(x.mean((2, 3)))

    def outputs(net: nn.Cell, *sides: int) -> dict:
        return {f"logits{side}": net(ms.Tensor(image(side))) for side in sides}

    net = fill(
        ResNet(
            True, ("bn{}", "down_sample_layer"), (1e-4, 1e-4, 1e-4), (False, False, False), "end_point", (2, 1, 1, 1)
        )
    )
    training = nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.SoftmaxCrossEntropyWithLogits(True)), nn.Momentum(net.trainable_params(), 0.1, 0.9)
    )
    save("models_resnet_bottleneck", training, **outputs(net, 33, 32))
    net = fill(
        ResNet(False, ("bn{}d", "down_sample_layer"), (1e-4, 1e-5, 1e-5), (True, True, True), "end_point", (2, 1))
    )
    save("models_resnet_basic", net, **outputs(net, 32))
    net = fill(ResNet(True, ("bn{}", "down_sample"), (1e-5, 1e-5, 1e-5), (True, True, False), "classifier", (2, 1)))
    save("mindcv_resnet_bottleneck", net, **outputs(net, 33, 34, 32))
    net = fill(ResNet(False, ("bn{}", "down_sample"), (1e-5, 1e-5, 1e-5), (True, True, False), "classifier", (2, 1)))
    save("mindcv_resnet_basic", net, **outputs(net, 33))

    def heads(x: ms.Tensor, count: int = HEADS) -> ms.Tensor:
        return x.reshape(x.shape[0], x.shape[1], count, -1).transpose(0, 2, 1, 3)

    def attend(q: ms.Tensor, k: ms.Tensor, v: ms.Tensor, hidden: np.ndarray) -> ms.Tensor:
        """q, k and v are [B, H, T, E]; ``hidden`` [B or 1, 1, T or 1, T] is 1 at keys that are not seen."""
        scores = ops.matmul(q, k.swapaxes(-1, -2)) / math.sqrt(q.shape[-1])
        mixed = ops.matmul(ops.softmax(scores - 10000.0 * ms.Tensor(hidden.astype(np.float32))), v)
        return mixed.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)

    class Projections(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.query_layer, self.key_layer, self.value_layer = (nn.Dense(WIDTH, WIDTH) for _ in range(3))

        def construct(self, x: ms.Tensor, hidden: np.ndarray) -> ms.Tensor:
            return attend(heads(self.query_layer(x)), heads(self.key_layer(x)), heads(self.value_layer(x)), hidden)

    class Output(nn.Cell):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.dense, self.layernorm = nn.Dense(inner, WIDTH), nn.LayerNorm((WIDTH,))

        def construct(self, x: ms.Tensor, before: ms.Tensor) -> ms.Tensor:
            return self.layernorm(before + self.dense(x))

    class SelfAttention(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.output = Projections(), Output(WIDTH)

        def construct(self, x: ms.Tensor, hidden: np.ndarray) -> ms.Tensor:
            return self.output(self.attention(x, hidden), x)

    class EncoderCell(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.output = SelfAttention(), Output(INNER)
            self.intermediate = nn.Dense(WIDTH, INNER, activation="gelu")

        def construct(self, x: ms.Tensor, hidden: np.ndarray) -> ms.Tensor:
            x = self.attention(x, hidden)
            return self.output(self.intermediate(x), x)

    class Postprocessor(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.token_type_embedding, self.full_position_embedding = (
                nn.Embedding(2, WIDTH),
                nn.Embedding(POSITIONS, WIDTH),
            )
            self.layernorm = nn.LayerNorm((WIDTH,))

        def construct(self, segments: ms.Tensor, x: ms.Tensor) -> ms.Tensor:
            positions = self.full_position_embedding(ops.arange(x.shape[1]).expand_dims(0))
            return self.layernorm(x + self.token_type_embedding(segments) + positions)

    class Transformer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.CellList([EncoderCell() for _ in range(LAYERS)])

    class BertModel(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.bert_embedding_lookup = nn.Embedding(VOCABULARY, WIDTH)
            self.bert_embedding_postprocessor = Postprocessor()
            self.bert_encoder = Transformer()
            self.dense = nn.Dense(WIDTH, WIDTH, activation="tanh")

        def construct(self, tokens: ms.Tensor, segments: ms.Tensor, hidden: np.ndarray) -> tuple:
            x = self.bert_embedding_postprocessor(segments, self.bert_embedding_lookup(tokens))
            for layer in self.bert_encoder.layers:
                x = layer(x, hidden)
            return x, self.dense(x[:, 0])

    class MaskedHead(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.layernorm = nn.Dense(WIDTH, WIDTH, activation="gelu"), nn.LayerNorm((WIDTH,))
            self.output_bias = ms.Parameter(ms.Tensor(np.zeros(VOCABULARY, np.float32)))

    class NextHead(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Dense(WIDTH, 2)

    class PreTraining(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.cls1, self.cls2 = BertModel(), MaskedHead(), NextHead()

        def construct(self, *inputs: object) -> tuple:
            x, pooled = self.bert(*inputs)
            head, table = self.cls1, self.bert.bert_embedding_lookup.embedding_table
            masked = ops.matmul(head.layernorm(head.dense(x)), table.T) + head.output_bias
            return x, pooled, self.cls2.dense(pooled), masked

    class WithLoss(nn.Cell):
        def __init__(self, net: nn.Cell) -> None:
            super().__init__()
            self.bert = net

    net = PreTraining()
    whole = WithLoss(net)
    fill(whole)
    hidden = (np.arange(TOKENS.shape[1])[None] >= LENGTHS[:, None])[:, None, None]
    states, pooled, following, masked = net(ms.Tensor(TOKENS), ms.Tensor(SEGMENTS), hidden)
    save("models_bert", whole, states=states, pooled=pooled, following=following, masked=masked)

    class DenseOfColumns(nn.Cell):
        """A dense layer whose weight is [inner, out]."""

        def __init__(self, inner: int, out: int) -> None:
            super().__init__()
            self.weight = ms.Parameter(ms.Tensor(np.zeros((inner, out), np.float32)))
            self.bias = ms.Parameter(ms.Tensor(np.zeros(out, np.float32)))

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return ops.matmul(x, self.weight) + self.bias

    class GPTAttention(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.projection = DenseOfColumns(WIDTH, WIDTH)
            self.dense1, self.dense2, self.dense3 = (nn.Dense(WIDTH, WIDTH) for _ in range(3))

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            q, k, v = (heads(layer(x)) for layer in (self.dense1, self.dense2, self.dense3))
            hidden = np.triu(np.ones((x.shape[1], x.shape[1])), 1)[None, None]
            return self.projection(attend(q, k, v, hidden))

    class GPTOutput(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.mapping, self.projection = DenseOfColumns(WIDTH, INNER), DenseOfColumns(INNER, WIDTH)
            self.activation = nn.get_activation("gelu")

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return self.projection(self.activation(self.mapping(x)))

    class GPTBlock(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layernorm1 = nn.LayerNorm((WIDTH,), epsilon=1e-5)
            self.layernorm2 = nn.LayerNorm((WIDTH,), epsilon=1e-5)
            self.attention, self.output = GPTAttention(), GPTOutput()

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            x = x + self.attention(self.layernorm1(x))
            return x + self.output(self.layernorm2(x))

    class GPTEmbedding(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.word_embedding, self.position_embedding = (
                nn.Embedding(VOCABULARY, WIDTH),
                nn.Embedding(POSITIONS, WIDTH),
            )

    class GPTBackbone(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layernorm = GPTEmbedding(), nn.LayerNorm((WIDTH,), epsilon=1e-5)
            self.blocks = nn.CellList([GPTBlock() for _ in range(LAYERS)])

    class GPT2LMHeadModel(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = GPTBackbone()

        def construct(self, tokens: ms.Tensor) -> ms.Tensor:
            embedding = self.backbone.embedding
            places = embedding.position_embedding(ops.arange(tokens.shape[1]).expand_dims(0))
            x = embedding.word_embedding(tokens) + places
            for block in self.backbone.blocks:
                x = block(x)
            return ops.matmul(self.backbone.layernorm(x), embedding.word_embedding.embedding_table.T)

    net = fill(GPT2LMHeadModel())
    save("mindformers_gpt2", net, logits=net(ms.Tensor(TOKENS)))

    class RMSNorm(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = ms.Parameter(ms.Tensor(np.ones(WIDTH, np.float32)))

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return x * ops.rsqrt(ops.mean(x * x, -1, keep_dims=True) + 1e-6) * self.weight

    def rotate(x: ms.Tensor) -> ms.Tensor:
        half = x.shape[-1] // 2
        angles = np.arange(x.shape[2])[:, None] * 500.0 ** (-np.arange(half) / half)
        cos, sin = (
            ms.Tensor(np.concatenate([part, part], -1).astype(np.float32)) for part in (np.cos(angles), np.sin(angles))
        )
        return x * cos + ops.cat([-x[..., half:], x[..., :half]], -1) * sin

    class LlamaAttention(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.wq, self.wo = nn.Dense(WIDTH, WIDTH, has_bias=False), nn.Dense(WIDTH, WIDTH, has_bias=False)
            self.wk, self.wv = nn.Dense(WIDTH, WIDTH // 2, has_bias=False), nn.Dense(WIDTH, WIDTH // 2, has_bias=False)

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            q, k, v = rotate(heads(self.wq(x))), rotate(heads(self.wk(x), HEADS // 2)), heads(self.wv(x), HEADS // 2)
            hidden = np.triu(np.ones((x.shape[1], x.shape[1])), 1)[None, None]
            return self.wo(attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), hidden))

    class LlamaFeedForward(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w3 = nn.Dense(WIDTH, INNER, has_bias=False), nn.Dense(WIDTH, INNER, has_bias=False)
            self.w2 = nn.Dense(INNER, WIDTH, has_bias=False)

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            return self.w2(ops.silu(self.w1(x)) * self.w3(x))

    class LlamaLayer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.feed_forward = LlamaAttention(), LlamaFeedForward()
            self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

        def construct(self, x: ms.Tensor) -> ms.Tensor:
            x = x + self.attention(self.attention_norm(x))
            return x + self.feed_forward(self.ffn_norm(x))

    class LlamaEmbedding(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.embedding_weight = ms.Parameter(ms.Tensor(np.zeros((VOCABULARY, WIDTH), np.float32)))

    class LlamaModel(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings, self.norm_out = LlamaEmbedding(), RMSNorm()
            self.layers = nn.CellList([LlamaLayer() for _ in range(LAYERS)])

    class LlamaForCausalLM(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head = LlamaModel(), nn.Dense(WIDTH, VOCABULARY, has_bias=False)

        def construct(self, tokens: ms.Tensor) -> ms.Tensor:
            x = ops.gather(self.model.tok_embeddings.embedding_weight, tokens, 0)
            for layer in self.model.layers:
                x = layer(x)
            return self.lm_head(self.model.norm_out(x))

    net = fill(LlamaForCausalLM())
    save("mindformers_llama", net, logits=net(ms.Tensor(TOKENS)))


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    {"mxnet": mxnet, "mindspore": mindspore}[sys.argv[1]](out)
    for made in out.iterdir():
        made.chmod(0o644)
