"""Pictures in a MindRecord file, LeNet-5, SGD with momentum.

python pack.py FOLDER
python after.py FOLDER
"""

import sys
from pathlib import Path

from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import max_pool2d, relu
from torch.utils.data import DataLoader

from unisono import OptimOptions, PlanOptions, ScheduleOptions, Trainer, TrainOptions, initialize
from unisono.data import mapped
from unisono.data.image import Augment, CenterCrop, ImageTransform
from unisono.data.sources import open_source
from unisono.train import METRICS, cross_entropy

CLASSES, BATCH, EPOCHS = 5, 32, 4


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES)

    def forward(self, image):
        image = max_pool2d(relu(self.conv1(image)), 2)
        image = max_pool2d(relu(self.conv2(image)), 2)
        return self.fc3(relu(self.fc2(relu(self.fc1(image.flatten(1))))))


def pictures(folder):
    mean, std = (120 / 255, 128 / 255, 136 / 255), (60 / 255, 64 / 255, 68 / 255)
    augment = Augment(size=(32, 32), crop=CenterCrop(share=1.0), mean=mean, std=std)
    data = open_source(folder / "train.mindrecord", columns={"image": "image", "targets": "label"})
    return mapped(data, ImageTransform(augment=augment))


def main(folder):
    net = initialize(LeNet(), [{"match": "*", "kind": "msra_prelu", "factor": "in", "slope": 0.0}], seed=0)
    if (folder / "start.safetensors").exists():  # the weights that before.py started from
        net.load_state_dict(load_file(folder / "start.safetensors"))
    train = pictures(folder)
    with Trainer(
        net,
        DataLoader(train, batch_size=BATCH),  # in order, as before
        PlanOptions(global_batch=BATCH, precision="fp32"),
        objective=cross_entropy,
        optimizer=OptimOptions(kind="sgd", lr=0.01, momentum=0.9, weight_decay=0.01, clip_norm=0.0),
        schedule=ScheduleOptions(kind="constant"),
        options=TrainOptions(epochs=EPOCHS, num_eval_samples=0),
        eval_data=train,
        metrics={"accuracy": METRICS["accuracy"]},
        run_dir=folder / "run",
    ) as run:
        for step in run:
            if run.world.rank == 0:
                print(f"step {step.index} loss {step.loss:.7g}", flush=True)
        accuracy = run.evaluate(train)["accuracy"]
        if run.world.rank == 0:
            print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
