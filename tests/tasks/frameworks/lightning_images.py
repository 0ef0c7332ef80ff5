"""Small pictures by Lightning's Trainer: two networks that a step calls, a schedule, clipping, an evaluation."""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 3))

    def losses(self, batch):
        images, labels = batch
        return nn.functional.cross_entropy(self.head(self.stem(images)), labels)

    def training_step(self, batch, number):
        loss = self.losses(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.log("held out", self.losses(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=6, help="images per rank")
    args = parser.parse_args()
    lightning.seed_everything(0)
    images = torch.randn(48, 1, 8, 8)
    data = TensorDataset(images, images.flatten(1)[:, :3].argmax(1))
    held_out = TensorDataset(*(tensor[:12] for tensor in data.tensors))
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", strategy="ddp", devices=int(os.environ.get("WORLD_SIZE", 1)), logger=False,
        gradient_clip_val=1.0, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(data, args.batch_size, shuffle=True), DataLoader(held_out, args.batch_size))


if __name__ == "__main__":
    main()
