"""Clusters swapped between views: a model of a list of crops, normalised prototypes, a queue, Sinkhorn iterations."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(32)
torch.set_default_dtype(torch.float64)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.prototypes = nn.Linear(8, 6, bias=False)

    def forward(self, inputs):
        x = F.normalize(torch.cat([self.backbone(view) for view in inputs]), dim=1, p=2)
        return x, self.prototypes(x)


@torch.no_grad()
def sinkhorn(out):
    q = torch.exp(out / 0.05).t()
    q /= torch.sum(q)
    for _ in range(3):
        q /= torch.sum(q, dim=1, keepdim=True) * q.shape[0]
        q /= torch.sum(q, dim=0, keepdim=True) * q.shape[1]
    return (q * q.shape[1]).t()


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6)
loader = DataLoader(TensorDataset(torch.rand(32, 12)), batch_size=8, shuffle=True, drop_last=True)
queue, use_the_queue = torch.zeros(2, 16, 8), False
losses = []
for epoch in range(2):
    for (x,) in loader:
        inputs = [x + 0.1 * torch.randn_like(x) for _ in range(2)]
        with torch.no_grad():
            w = model.prototypes.weight.data.clone()
            model.prototypes.weight.copy_(F.normalize(w, dim=1, p=2))
        embedding, output = model(inputs)
        embedding, n, loss = embedding.detach(), len(x), 0
        for i in range(2):
            with torch.no_grad():
                out = output[n * i : n * (i + 1)].detach()
                if use_the_queue or not torch.all(queue[i, -1, :] == 0):
                    use_the_queue = True
                    out = torch.cat((torch.mm(queue[i], model.prototypes.weight.t()), out))
                queue[i, n:] = queue[i, :-n].clone()
                queue[i, :n] = embedding[i * n : (i + 1) * n]
                q = sinkhorn(out)[-n:]
            p = output[n * (1 - i) : n * (2 - i)] / 0.1
            loss -= torch.mean(torch.sum(q * F.log_softmax(p, dim=1), dim=1)) / 2
        optimizer.zero_grad()
        loss.backward()
        if epoch < 1:
            for name, p in model.named_parameters():
                if "prototypes" in name:
                    p.grad = None
        optimizer.step()
        losses.append(loss.item())
