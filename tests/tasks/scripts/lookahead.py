"""Lookahead around Adam, as its gists have it: slow weights every five steps."""

from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
torch.set_default_dtype(torch.float64)
loader = DataLoader(TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,))), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


class Lookahead:
    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        self.counter = 0

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        loss = self.optimizer.step()
        self.counter += 1
        for group in self.param_groups:
            for fast in group["params"]:
                state = self.state[fast]
                if "slow" not in state:
                    state["slow"] = torch.zeros_like(fast.data)
                    state["slow"].copy_(fast.data)
                if self.counter % self.k == 0:
                    slow = state["slow"]
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
        return loss


optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
optimizer = Lookahead(optimizer)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
