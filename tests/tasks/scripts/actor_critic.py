"""An actor and a critic, each with an optimizer and a loss of its own, on recorded steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(24)
torch.set_default_dtype(torch.float64)
state, action, reward, after = torch.randn(24, 5), torch.randint(0, 3, (24,)), torch.randn(24), torch.randn(24, 5)
loader = DataLoader(TensorDataset(state, action, reward, after), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
critic = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
critics = torch.optim.Adam(critic.parameters(), lr=1e-2, eps=1e-4)
losses = []
for epoch in range(2):
    for s, a, r, s2 in loader:
        value = critic(s).squeeze(1)
        with torch.no_grad():
            target = r + 0.9 * critic(s2).squeeze(1)
        critic_loss = nn.functional.smooth_l1_loss(value, target)
        critics.zero_grad()
        critic_loss.backward()
        critics.step()
        policy = torch.distributions.Categorical(logits=model(s))
        loss = -(policy.log_prob(a) * (target - value.detach())).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [critic_loss.item(), loss.item()]
