"""A DCGAN as its tutorial has it: batch norm in both nets, two optimizers, samples of fixed noise in training mode."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
torch.set_default_dtype(torch.float64)
images = torch.rand(20, 1, 8, 8) * 2 - 1
loader = DataLoader(TensorDataset(images), batch_size=8, shuffle=True)
model = nn.Sequential(
    nn.ConvTranspose2d(4, 8, 4, 1, 0, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
judge = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False),
    nn.BatchNorm2d(8),
    nn.LeakyReLU(0.2),
    nn.Conv2d(8, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-4)
judges = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999), eps=1e-4)
fixed_noise = torch.randn(8, 4, 1, 1)

losses = []
for (real,) in loader:
    b = real.size(0)
    judge.zero_grad()
    fake = model(torch.randn(b, 4, 1, 1))
    loss_d = criterion(judge(real), torch.ones(b)) + criterion(judge(fake.detach()), torch.zeros(b))
    loss_d.backward()
    judges.step()
    model.zero_grad()
    loss = criterion(judge(fake), torch.ones(b))
    loss.backward()
    optimizer.step()
    losses += [loss_d.item(), loss.item()]
    with torch.no_grad():
        made = model(fixed_noise)
