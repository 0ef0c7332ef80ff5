"""Text from scratch: a small decoder learns the next byte of Python's standard library, then writes some.

python examples/text.py --plan dp_shard=2,zero=3
"""

import draw
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from shardwise import Task, train
from shardwise.data import split, standard_library_corpus

CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # (B, S, H)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.mlp(self.norm2(x))


class Writer(nn.Module):
    def __init__(self, width=64, heads=4, layers=2):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens):  # (B, S) -> (B, S, 256)
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def inputs(batch):
    return (batch["tokens"][:, :-1],), {}


def loss(logits, batch):  # a sum and its weight, the number of bytes
    targets = batch["tokens"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def optimizer(groups):
    return torch.optim.AdamW(groups, lr=2e-3)


def task():
    data, held_out = split(standard_library_corpus(), CONTEXT)
    return Task(Writer, loss, data=data, eval_data=held_out, inputs=inputs, optimizer=optimizer, name="writer")


@torch.no_grad()
def write(model, start, count=160):
    tokens = list(start.encode())
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        chances = (model(torch.tensor([tokens[-CONTEXT:]]))[0, -1] / 0.6).softmax(-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")


def main(arguments=None):
    given = draw.asked(__doc__, 200, arguments)
    more = {"out": str(given.out), "batch_samples": 16, "eval_every": max(given.steps // 5, 1), "eval_samples": 64}
    run = train(f"{__file__}:task", given.plan, steps=given.steps, **more)
    print(run)
    model = Writer()
    model.load_state_dict(load_file(run.folder / "model.safetensors"))
    print(write(model.eval(), "def "))
    curves = {"training": draw.losses(run.metrics), "held out": draw.losses(run.metrics, "eval_loss")}
    draw.save(draw.lines(curves, f"The next byte, plan {given.plan}", "nats"), given.out / "text.svg")


if __name__ == "__main__":
    main()
