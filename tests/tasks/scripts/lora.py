"""Low-rank adapters on a frozen transformer: only they are trained, and the rest keeps its weights."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(19)
torch.set_default_dtype(torch.float64)
tokens, labels = torch.randint(0, 20, (12, 6)), torch.randint(0, 3, (12,))
loader = DataLoader(TensorDataset(tokens, labels), batch_size=4, shuffle=True)


class LoRA(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc1, self.fc2, self.head = (
            nn.Embedding(20, 8),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        h = self.embed(x)
        return self.head((h + self.fc2(torch.relu(self.fc1(h)))).mean(1))


model = Classifier().requires_grad_(False)
model.fc1, model.fc2 = LoRA(model.fc1), LoRA(model.fc2)
model.head.requires_grad_(True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
