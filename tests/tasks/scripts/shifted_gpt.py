"""A GPT from scratch on windows of tokens, whose labels are its inputs one place further on."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.manual_seed(31)
torch.set_default_dtype(torch.float64)
V, T, D, H = 17, 13, 16, 2
tokens = torch.randint(0, V, (12, T))
train, held_out = tokens[:10], tokens[10:]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        B, S, _ = x.shape
        q, k, v = (t.view(B, S, H, D // H).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(D, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(B, S, D))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, D), nn.Embedding(T, D)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f, self.lm_head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def loss_of(logits, idx):
    shift_logits, shift_labels = logits[:, :-1, :].contiguous(), idx[:, 1:].contiguous()
    return F.cross_entropy(shift_logits.view(-1, V), shift_labels.view(-1))


loader = DataLoader(train, batch_size=4, shuffle=True)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-4)
losses = []
made, correct = [], 0
for epoch in range(2):
    model.train()
    for idx in loader:
        optimizer.zero_grad(set_to_none=True)
        logits = model(idx)
        loss = loss_of(logits, idx)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        correct += (logits.argmax(-1)[:, :-1] == idx[:, 1:]).sum().item()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        made.append(loss_of(model(held_out), held_out).item())

idx = held_out[:1, :1]
with torch.no_grad():
    for _ in range(5):
        idx = torch.cat([idx, model(idx)[:, -1].argmax(-1, keepdim=True)], 1)
generated = idx
made = torch.tensor(made)
