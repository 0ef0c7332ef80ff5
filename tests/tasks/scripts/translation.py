"""Images of two kinds translated into each other: two generators with one optimizer, two judges, pools of images."""

import itertools
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(34)
random.seed(34)
torch.set_default_dtype(torch.float64)


class Pool:
    def __init__(self, size):
        self.size, self.images = size, []

    def query(self, images):
        found = []
        for image in images.detach():
            if len(self.images) < self.size:
                self.images.append(image)
            elif random.uniform(0, 1) > 0.5:
                i = random.randint(0, self.size - 1)
                image, self.images[i] = self.images[i].clone(), image
            found.append(image)
        return torch.stack(found)


def generator():
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.InstanceNorm2d(6), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))


a_to_b, b_to_a = generator(), generator()
judge = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 1, 3, padding=1))
model = nn.ModuleList([a_to_b, b_to_a])
optimizer = torch.optim.Adam(itertools.chain(a_to_b.parameters(), b_to_a.parameters()), lr=2e-3, eps=1e-4)
judges = torch.optim.Adam(judge.parameters(), lr=2e-3, eps=1e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda e: 1.0 - e / 3)
mse, l1 = nn.MSELoss(), nn.L1Loss()
loader = DataLoader(TensorDataset(torch.randn(12, 1, 8, 8), torch.randn(12, 1, 8, 8)), batch_size=4, shuffle=True)
pool = Pool(6)
losses = []
for epoch in range(2):
    for real_a, real_b in loader:
        valid, fake = torch.ones(len(real_a), 1, 4, 4), torch.zeros(len(real_a), 1, 4, 4)
        optimizer.zero_grad()
        fake_b, fake_a = a_to_b(real_a), b_to_a(real_b)
        cycle = l1(b_to_a(fake_b), real_a) + l1(a_to_b(fake_a), real_b)
        loss = mse(judge(fake_b), valid) + 5 * cycle + 2 * l1(a_to_b(real_b), real_b)
        loss.backward()
        optimizer.step()
        judges.zero_grad()
        judged = (mse(judge(real_b), valid) + mse(judge(pool.query(fake_b)), fake)) / 2
        judged.backward()
        judges.step()
        losses += [loss.item(), judged.item()]
    scheduler.step()
