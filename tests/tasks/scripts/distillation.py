"""A student that learns from a teacher's softened outputs and from labels."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(16)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(18, 8), torch.randint(0, 4, (18,))
teacher = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).eval()
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
loader = DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
T = 3.0
losses = []
for epoch in range(2):
    for x, y in loader:
        with torch.no_grad():
            soft = F.softmax(teacher(x) / T, dim=1)
        logits = model(x)
        kd = F.kl_div(F.log_softmax(logits / T, dim=1), soft, reduction="batchmean") * T * T
        loss = 0.7 * kd + 0.3 * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
