import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Pairs(Dataset):
    def __init__(self, n=52):
        self.a, self.b = torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8)
        self.same = torch.randint(0, 2, (n,))

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return (self.a[i], self.b[i]), self.same[i]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2)
        self.fc = nn.Linear(16 * 9, 8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(self.conv2(x)).flatten(1)
        return F.normalize(self.fc(self.drop(x)), dim=1)


def contrastive(u, v, same, margin=1.0):
    d = F.pairwise_distance(u, v)
    return torch.mean(same * d.pow(2) + (1 - same) * F.relu(margin - d).pow(2))


model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
loader = DataLoader(Pairs(), batch_size=12, shuffle=True)
losses = []
for epoch in range(2):
    for (a, b), same in loader:
        loss = contrastive(model(a), model(b), same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
