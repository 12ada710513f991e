"""Pictures in a MindRecord file, LeNet-5, Momentum, and MindSpore's Model.

python pack.py FOLDER
python before.py FOLDER
"""

import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn
from mindspore.common.initializer import HeNormal
from mindspore.dataset import MindDataset, transforms, vision
from mindspore.train import Callback, Model

CLASSES, BATCH, EPOCHS = 5, 32, 4


class LeNet(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5, pad_mode="valid", has_bias=True, weight_init=HeNormal())
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid", has_bias=True, weight_init=HeNormal())
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(400, 120, weight_init=HeNormal())
        self.fc2 = nn.Dense(120, 84, weight_init=HeNormal())
        self.fc3 = nn.Dense(84, CLASSES)

    def construct(self, image):
        image = self.pool(self.relu(self.conv1(image)))
        image = self.pool(self.relu(self.conv2(image)))
        hidden = self.relu(self.fc1(self.flatten(image)))
        return self.fc3(self.relu(self.fc2(hidden)))


def pictures(folder):
    data = MindDataset(str(folder / "train.mindrecord"), columns_list=["image", "label"], shuffle=False)
    steps = [
        vision.Decode(),
        vision.Normalize(mean=(120, 128, 136), std=(60, 64, 68)),
        vision.HWC2CHW(),
    ]
    data = data.map(steps, input_columns="image")
    data = data.map(transforms.TypeCast(ms.int32), input_columns="label")
    return data.batch(BATCH, drop_remainder=True)


class PrintLoss(Callback):
    def on_train_step_end(self, run_context):
        state = run_context.original_args()
        print(f"step {state.cur_step_num} loss {float(state.net_outputs.asnumpy()):.7g}")


def main(folder):
    ms.set_seed(0)
    net = LeNet()
    ms.save_checkpoint(net, str(folder / "start.safetensors"), format="safetensors")
    decayed = [p for p in net.trainable_params() if "bias" not in p.name]
    others = [p for p in net.trainable_params() if "bias" in p.name]
    optimizer = nn.Momentum(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others}], learning_rate=0.01, momentum=0.9
    )
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    model = Model(net, loss, optimizer, metrics={"accuracy"})
    model.train(EPOCHS, pictures(folder), callbacks=[PrintLoss()], dataset_sink_mode=False)
    print(f"accuracy {model.eval(pictures(folder), dataset_sink_mode=False)['accuracy']:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
