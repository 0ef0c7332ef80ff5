"""An image classifier with mixup: each sample is mixed with another one of its batch."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(22)
np.random.seed(22)
torch.set_default_dtype(torch.float64)
images, labels = torch.randn(20, 3, 8, 8), torch.randint(0, 4, (20,))
loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def mixup_data(x, y, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    index = torch.randperm(x.size(0))
    return lam * x + (1 - lam) * x[index], y, y[index], lam


losses = []
for epoch in range(2):
    for x, y in loader:
        x, y_a, y_b, lam = mixup_data(x, y)
        output = model(x)
        loss = lam * criterion(output, y_a) + (1 - lam) * criterion(output, y_b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
