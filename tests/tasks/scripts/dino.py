"""Self-distillation without labels: a student, a teacher that follows, centering and sharpening."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)
torch.set_default_dtype(torch.float64)


class DINOLoss(nn.Module):
    def __init__(self, out_dim, ncrops=2):
        super().__init__()
        self.ncrops = ncrops
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        student_out = (student_output / 0.1).chunk(self.ncrops)
        teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach().chunk(self.ncrops)
        total, n = 0, 0
        for iq, q in enumerate(teacher_out):
            for v in range(len(student_out)):
                if v != iq:
                    total += torch.sum(-q * F.log_softmax(student_out[v], dim=-1), dim=-1).mean()
                    n += 1
        self.update_center(teacher_output)
        return total / n

    @torch.no_grad()
    def update_center(self, teacher_output):
        self.center = self.center * 0.9 + teacher_output.mean(dim=0, keepdim=True) * 0.1


loader = DataLoader(TensorDataset(torch.rand(20, 12)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 6))
teacher = copy.deepcopy(model)
for p in teacher.parameters():
    p.requires_grad = False
dino_loss = DINOLoss(6)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
losses = []
it = 0
for epoch in range(2):
    for (x,) in loader:
        views = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
        loss = dino_loss(model(torch.cat(views)), teacher(torch.cat(views)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        m = 1 - 0.1 * (math.cos(math.pi * it / 6) + 1) / 2
        with torch.no_grad():
            for q, k in zip(model.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(m).add_((1 - m) * q.detach().data)
        it += 1
        losses.append(loss.item())
