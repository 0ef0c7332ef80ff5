"""A U-Net on real temperatures: the surface of the sea along the equator, a month ahead.

Data: monthly means of OSTIA, April 2006 to September 2010, between 5 degrees south and north, from the package
iris-sample-data (Crown copyright, Open Government Licence). Land has no value and counts nothing.

    python examples/fields.py --plan dp_shard=2,zero=2
"""

from pathlib import Path

import draw
import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from shardwise import InputError, Task, train
from shardwise.data import FieldSource
from shardwise.models.unet import UNet, UNetConfig

TRAINING, ALL = 42, 54  # months
LAND = {"missing": "mask", "region": ((1, 17), (0, 432))}  # 16 of 18 rows: two scales halve them


class Ahead(nn.Module):
    """This month's field, and what a U-Net adds to it."""

    def __init__(self):
        super().__init__()
        self.unet = UNet(UNetConfig(channels=6, out_channels=1, width=16, depth=2))

    def forward(self, now, sea, forcing, static):  # (B, 1, 16, 432), (B, 1, ...), (B, 2, ...), (B, 2, ...)
        return now + self.unet(torch.cat([now, sea, forcing, static], 1))


def inputs(batch):
    return (batch["inputs"], batch["inputs_valid"].to(batch["inputs"].dtype), batch["forcing"], batch["static"]), {}


def loss(output, batch):
    sea = batch["targets_valid"]
    return ((output - batch["targets"]) * sea).square().sum(), sea.sum()


def optimizer(groups):
    return torch.optim.AdamW(groups, lr=2e-3)


def source():
    try:
        import iris_sample_data
    except ImportError as error:
        raise InputError(f"{error}: pip install 'shardwise[examples]'") from error
    Path("runs").mkdir(exist_ok=True)
    path = Path(iris_sample_data.path) / "ostia_monthly.nc"
    known = {"cycles": ["year"], "static": ["latitude", "longitude"]}
    return FieldSource(
        path, ["surface_temperature"], **known, **LAND, times=(0, TRAINING), statistics="runs/ostia.json"
    )


def task():
    fields = source()
    more = {"inputs": inputs, "optimizer": optimizer, "name": "sea-temperature"}
    return Task(Ahead, loss, data=fields, eval_data=fields.over(TRAINING, ALL), **more)


def picture(fields, model):
    """A held-out month, the truth, the forecast's error and that of no change, and both over all held-out months."""
    held_out = fields.over(TRAINING, ALL)
    batch = held_out.read(list(range(len(held_out))))
    with torch.no_grad():
        guess = model.eval()(*inputs(batch)[0])
    kelvin = [held_out.physical("targets", x) for x in (batch["inputs"], batch["targets"], guess)]
    now, then, ahead = (np.where(batch["targets_valid"], x.numpy(), np.nan)[:, 0, ::-1] for x in kelvin)
    scores = [float(np.sqrt(np.nanmean((x - then) ** 2))) for x in (ahead, now)]
    rows = [("the month after, 293 to 304 K", then[6], 293, 304), ("forecast", ahead[6], 293, 304),
            ("error of the forecast, -2 to 2 K", ahead[6] - then[6], -2, 2),
            ("error of no change, -2 to 2 K", now[6] - then[6], -2, 2)]  # fmt: skip
    title = f"RMSE over {len(held_out)} held-out months: U-Net {scores[0]:.3f} K, no change {scores[1]:.3f} K"
    drawn = [draw.text(10, 20, title, 'font-weight="bold"')]
    for y, (name, values, low, high) in zip(range(54, 600, 78), rows, strict=False):
        drawn += [draw.text(10, y - 6, name), draw.pixels(10, y, 864, 48, draw.shaded(values, low, high))]
    return title, draw.sheet(drawn, 884, 54 + 78 * len(rows))


def main(arguments=None):
    given = draw.asked(__doc__, 200, arguments)
    run = train(f"{__file__}:task", given.plan, steps=given.steps, out=str(given.out), batch_samples=8)
    model = Ahead()
    model.load_state_dict(load_file(run.folder / "model.safetensors"))
    title, drawn = picture(source(), model)
    print(f"{run}\n{title}")
    draw.save(drawn, given.out / "fields.svg")


if __name__ == "__main__":
    main()
