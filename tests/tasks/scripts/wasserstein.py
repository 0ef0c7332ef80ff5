"""A Wasserstein GAN with a gradient penalty; the critic steps at each batch, the generator at every second."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)
torch.set_default_dtype(torch.float64)


def compute_gradient_penalty(D, real_samples, fake_samples):
    alpha = torch.rand(real_samples.size(0), 1)
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = D(interpolates)
    fake = torch.ones(real_samples.shape[0], 1)
    gradients = torch.autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=fake,
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


loader = DataLoader(TensorDataset(torch.randn(22, 5)), batch_size=6, shuffle=True)
model = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Linear(16, 5))
critic = nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-4)
critics = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-4)
losses = []
for epoch in range(2):
    for i, (real,) in enumerate(loader):
        critics.zero_grad()
        z = torch.randn(real.shape[0], 3)
        fake = model(z)
        penalty = compute_gradient_penalty(critic, real.data, fake.data)
        d_loss = -critic(real).mean() + critic(fake.detach()).mean() + 10 * penalty
        d_loss.backward()
        critics.step()
        optimizer.zero_grad()
        if i % 2 == 0:
            loss = -critic(model(z)).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
