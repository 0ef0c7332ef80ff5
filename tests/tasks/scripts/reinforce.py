"""Advantage actor-critic on a toy environment: episodes are played by the policy, then learned from in mini-batches."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(15)
torch.set_default_dtype(torch.float64)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pi, self.v = nn.Sequential(nn.Linear(3, 16), nn.Tanh()), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, s):
        h = self.body(s)
        return torch.distributions.Categorical(logits=self.pi(h)).logits, self.v(h).squeeze(-1)


def play(model, steps=24):
    state, rows = torch.zeros(3), []
    with torch.no_grad():
        for _ in range(steps):
            logits, value = model(state[None])
            action = torch.distributions.Categorical(logits=logits).sample()[0]
            reward = -(state[0] - (1.0 if action else -1.0)).abs()
            rows.append((state, action, reward - value[0], reward))
            state = 0.7 * state + 0.3 * torch.randn(3) + 0.1 * action
    return TensorDataset(*(torch.stack(column) for column in zip(*rows, strict=True)))


def rollouts():
    for _ in range(2):
        yield from DataLoader(play(model), batch_size=8, shuffle=True)


model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
loader = rollouts()
losses = []
for states, actions, advantages, returns in loader:
    logits, values = model(states)
    log_prob = torch.distributions.Categorical(logits=logits).log_prob(actions)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    loss = -(log_prob * advantages).mean() + 0.5 * (values - returns).pow(2).mean() - 0.01 * entropy.mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
