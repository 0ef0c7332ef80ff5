"""A message-passing network on small graphs, padded to dense adjacency by a collate function; one number each."""

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(11)
torch.set_default_dtype(torch.float64)
graphs = []
for _ in range(14):
    n = int(torch.randint(3, 8, ()))
    edges = (torch.rand(n, n) < 0.4).double()
    nodes = torch.randn(n, 5)
    graphs.append((nodes, ((edges + edges.T) > 0).double(), nodes.sum().sin()))


def collate(rows):
    n = max(len(nodes) for nodes, _, _ in rows)
    x, a, mask = torch.zeros(len(rows), n, 5), torch.zeros(len(rows), n, n), torch.zeros(len(rows), n)
    for i, (nodes, edges, _) in enumerate(rows):
        x[i, : len(nodes)], a[i, : len(nodes), : len(nodes)], mask[i, : len(nodes)] = nodes, edges, 1
    return x, a, mask, torch.stack([y for _, _, y in rows])


class MPNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.message, self.update = nn.Linear(5, 8), nn.Linear(8, 8), nn.GRUCell(8, 8)
        self.read = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x, a, mask):
        h = torch.tanh(self.embed(x))
        for _ in range(2):
            m = a @ self.message(h)
            h = self.update(m.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        return self.read((h * mask[..., None]).sum(1)).squeeze(-1)


model = MPNN()
loader = DataLoader(graphs, batch_size=6, shuffle=True, collate_fn=collate)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-4)
losses = []
for epoch in range(2):
    for x, a, mask, y in loader:
        loss = nn.functional.l1_loss(model(x, a, mask), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
