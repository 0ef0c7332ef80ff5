"""Momentum contrast: a queue of keys, a momentum encoder."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
loader = DataLoader(TensorDataset(torch.randn(20, 8)), batch_size=4, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
key_encoder = copy.deepcopy(model)
for p in key_encoder.parameters():
    p.requires_grad = False
queue = F.normalize(torch.randn(4, 12), dim=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
pointer = 0
losses = []
for epoch in range(2):
    for (x,) in loader:
        q = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        with torch.no_grad():
            for k, p in zip(key_encoder.parameters(), model.parameters(), strict=True):
                k.data = k.data * 0.9 + p.data * 0.1
            k = F.normalize(key_encoder(x + 0.1 * torch.randn_like(x)), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue[:, pointer : pointer + len(k)] = k.T
        pointer = (pointer + len(k)) % queue.shape[1]
        losses.append(loss.item())
made = queue
