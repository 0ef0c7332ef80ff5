"""Images: a small residual network names handwritten digits (scikit-learn's, 8 x 8 pixels).

python examples/images.py --plan dp_replicate=2
"""

import draw
import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from shardwise import Task, train
from shardwise.data import digits_split


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return F.relu(x + self.second(F.relu(self.first(x))))


class Reader(nn.Module):
    def __init__(self, width=16, blocks=3):
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.leave = nn.Linear(16 * width, 10)

    def forward(self, image):  # (B, 1, 8, 8) -> (B, 10)
        x = F.relu(self.enter(image))
        for block in self.blocks:
            x = block(x)
        return self.leave(F.max_pool2d(x, 2).flatten(1))


def inputs(batch):
    return (batch["image"],), {}


def loss(logits, batch):
    return F.cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"])


def metrics(logits, batch):
    return {"accuracy": ((logits.argmax(1) == batch["label"]).sum(), len(batch["label"]))}


def optimizer(groups):
    return torch.optim.AdamW(groups, lr=2e-3)


def task():
    data, held_out = digits_split()
    more = {"inputs": inputs, "metrics": metrics, "optimizer": optimizer, "name": "digit-reader"}
    return Task(Reader, loss, data=data, eval_data=held_out, **more)


def picture(images, labels, guesses, columns=16):
    """Digits with what they were taken for: right ones grey, wrong ones red with the truth."""
    drawn = []
    for place, (image, label, guess) in enumerate(zip(images, labels, guesses, strict=True)):
        x, y = 8 + place % columns * 44, 34 + place // columns * 62
        drawn.append(draw.pixels(x, y, 40, 40, np.repeat(255 - 255 * image[0, :, :, None], 3, 2)))
        right = label == guess
        words, colour = (f"{guess}", "#777") if right else (f"{guess}, is {label}", "#c00")
        drawn.append(draw.text(x + 2, y + 53, words, f'fill="{colour}"'))
    share = (labels == guesses).mean()
    drawn.append(draw.text(8, 20, f"Held-out digits, {share:.1%} of these read right", 'font-weight="bold"'))
    return draw.sheet(drawn, 16 + columns * 44, 44 + -(-len(labels) // columns) * 62)


def main(arguments=None):
    given = draw.asked(__doc__, 100, arguments)
    run = train(f"{__file__}:task", given.plan, steps=given.steps, out=str(given.out), eval_samples=0)
    print(run)
    model = Reader()
    model.load_state_dict(load_file(run.folder / "model.safetensors"))
    held_out = digits_split()[1].read(list(range(96)))
    with torch.no_grad():
        guesses = model.eval()(held_out["image"]).argmax(1)
    draw.save(picture(*(x.numpy() for x in (*held_out.values(), guesses))), given.out / "images.svg")


if __name__ == "__main__":
    main()
