"""Mean teacher: labelled batches of 4, unlabelled ones of 10, noise on both, a teacher averaged by hand."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
labelled = DataLoader(TensorDataset(torch.randn(14, 6), torch.randint(0, 3, (14,))), batch_size=4, shuffle=True)
unlabelled = DataLoader(TensorDataset(torch.randn(33, 6)), batch_size=10, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
teacher = copy.deepcopy(model)
for p in teacher.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = []
step = 0
others = iter(unlabelled)
for epoch in range(3):
    for x, y in labelled:
        try:
            (u,) = next(others)
        except StopIteration:
            others = iter(unlabelled)
            (u,) = next(others)
        logits = model(x + 0.05 * torch.randn_like(x))
        student = model(u + 0.05 * torch.randn_like(u))
        with torch.no_grad():
            target = teacher(u + 0.05 * torch.randn_like(u))
        cons = F.mse_loss(student.softmax(1), target.softmax(1))
        loss = F.cross_entropy(logits, y) + 0.5 * cons
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        alpha = min(1 - 1 / (step + 1), 0.99)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), model.parameters(), strict=True):
                t.mul_(alpha).add_(s, alpha=1 - alpha)
        losses.append(loss.item())
made = torch.cat([p.flatten() for p in teacher.parameters()])
