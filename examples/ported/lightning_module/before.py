"""A network predicts a number and how sure it is, as a LightningModule."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def houses(count, seed):
    """Rows of a table [8], and a number whose noise grows with the first column."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(count, 8, generator=generator)
    noise = torch.randn(count, generator=generator) * (0.05 + 0.3 * rows[:, 0])
    return TensorDataset(rows, (3 * rows[:, 1] * rows[:, 2] - rows[:, 3] + noise).unsqueeze(1))


class Estimator(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, rows):
        mean, spread = self.layers(rows).chunk(2, dim=1)
        return mean, F.softplus(spread) + 1e-3

    def training_step(self, batch, batch_idx):
        rows, targets = batch
        loss = F.gaussian_nll_loss(*self.in_order(rows, targets))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        rows, targets = batch
        self.log("val_loss", F.gaussian_nll_loss(*self.in_order(rows, targets)), prog_bar=True)
        self.log("val_mae", F.l1_loss(self(rows)[0], targets), prog_bar=True)

    def in_order(self, rows, targets):
        mean, variance = self(rows)
        return mean, targets, variance

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    L.seed_everything(0)
    model = Estimator(lr=1e-2)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        gradient_clip_val=0.5,
        logger=CSVLogger("logs"),
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=1)],
        enable_progress_bar=False,
    )
    trainer.fit(
        model,
        train_dataloaders=DataLoader(houses(256, seed=1), batch_size=32, shuffle=True),
        val_dataloaders=DataLoader(houses(100, seed=2), batch_size=32),
    )


if __name__ == "__main__":
    main()
