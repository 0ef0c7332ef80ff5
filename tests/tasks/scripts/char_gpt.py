"""A character GPT on a few lines of text: random crops, dropout, clipping, warm-up, and a sample at the end."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
text = "the order of the samples depends on the seed alone, and the seed depends on nothing. " * 4
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
T, B, D, H = 12, 8, 16, 2


def get_batch():
    at = torch.randint(len(data) - T - 1, (B,))
    x = torch.stack([data[i : i + T] for i in at])
    return x, torch.stack([data[i + 1 : i + T + 1] for i in at])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D), nn.Dropout(0.1))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, H, D // H).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        att = (q @ k.transpose(-2, -1)) * (D // H) ** -0.5
        att = att.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), float("-inf"))
        y = self.drop(att.softmax(-1)) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, t, D))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(len(chars), D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(D, len(chars), bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x):
        return self.head(self.blocks(self.tok(x) + self.pos(torch.arange(x.shape[1]))))


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, eps=1e-4
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
loader = (get_batch() for _ in range(5))

losses = []
for x, y in loader:
    logits = model(x)
    loss = F.cross_entropy(logits.view(-1, len(chars)), y.view(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())

model.eval()
written = data[:4].view(1, -1)
with torch.no_grad():
    for _ in range(8):
        probabilities = model(written[:, -T:])[:, -1].softmax(-1)
        written = torch.cat([written, torch.multinomial(probabilities, 1)], 1)
sample = "".join(chars[i] for i in written[0])
