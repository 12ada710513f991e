"""Idioms of Lightning 2.6; after.py has the same under the same names."""

import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
)
from nets import dense
from shared_samples import INPUTS, TARGETS
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


def given():
    data = TensorDataset(
        torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)
    )
    return {
        "net": dense,
        "data": lambda: data,
        "loss_fn": lambda: _loss,
        "module": lambda: Module(dense()),
    }


def _loss(outputs, targets):
    return 0.5 * (outputs - targets).square().mean()


class Module(L.LightningModule):
    def __init__(self, net, momentum=0.0, lr=0.1):
        super().__init__()
        self.net, self.momentum, self.lr = net, momentum, lr

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return _loss(self.net(inputs).float(), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", _loss(self.net(inputs), targets))

    def configure_optimizers(self):
        return torch.optim.SGD(
            self.net.parameters(),
            lr=self.lr,
            momentum=self.momentum,
        )


def _weights(net):
    return [net.weight, net.bias]


def fit(net, data, loss_fn):
    class Module(L.LightningModule):
        def training_step(self, batch, batch_idx):
            inputs, targets = batch
            return loss_fn(net(inputs), targets)

        def configure_optimizers(self):
            return torch.optim.SGD(net.parameters(), lr=0.1)

    module = Module()
    module.net = net
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        strategy="auto",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=16))
    return _weights(net)


def accumulation(module, data):
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=16))
    net = module.net
    return _weights(net)


def precision(module, data):
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=16))
    net = module.net
    return _weights(net)


def callbacks(module, data):
    module.lr = 3.0  # too large: the loss grows
    best = ModelCheckpoint(
        "checkpoints", monitor="val_loss", save_top_k=1
    )
    trainer = L.Trainer(
        max_epochs=8,
        accelerator="cpu",
        callbacks=[
            EarlyStopping(monitor="val_loss", patience=2),
            best,
        ],
        num_sanity_val_steps=0,
        logger=False,
    )
    trainer.fit(
        module,
        DataLoader(data, batch_size=16),
        DataLoader(data, batch_size=64),
    )
    epochs, value = trainer.current_epoch, best.best_model_score
    return [epochs, float(value)]


def resume(module, data):
    module.momentum = 0.9
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False
    )
    trainer.fit(module, DataLoader(data, batch_size=16))
    trainer.save_checkpoint("last.ckpt")

    # another process trains two epochs more
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False
    )
    trainer.fit(
        module,
        DataLoader(data, batch_size=16),
        ckpt_path="last.ckpt",
    )
    net = module.net
    return _weights(net)
