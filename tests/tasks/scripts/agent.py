"""Proximal policy optimisation: an agent without a forward, whose methods call its actor and critic."""

import torch
from torch import nn
from torch.distributions.categorical import Categorical

torch.manual_seed(31)
torch.set_default_dtype(torch.float64)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def minibatches(updates=2, steps=6, envs=4, size=8):
    state = torch.zeros(envs, 4)
    for _ in range(updates):
        rows = []
        with torch.no_grad():
            for _ in range(steps):
                action, log_prob, _, value = model.get_action_and_value(state)
                after = 0.8 * state + 0.2 * torch.sin(torch.arange(4) + action[:, None].double())
                rows.append((state, action, log_prob, after.sum(1), value.flatten()))
                state = after
            next_value = model.get_value(state).flatten()
        obs, actions, log_probs, rewards, values = (torch.stack(column) for column in zip(*rows, strict=True))
        advantages, last = torch.zeros_like(rewards), torch.zeros(envs)
        for t in reversed(range(steps)):
            delta = rewards[t] + 0.99 * (values[t + 1] if t + 1 < steps else next_value) - values[t]
            advantages[t] = last = delta + 0.99 * 0.95 * last
        held = (obs, actions, log_probs, advantages, advantages + values, values)
        for index in torch.randperm(steps * envs).split(size):
            yield [one.flatten(0, 1)[index] for one in held]


model = Agent()
optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-3, eps=1e-4)
loader = minibatches()
losses = []
for obs, actions, log_probs, advantages, returns, values in loader:
    _, new_log_prob, entropy, new_value = model.get_action_and_value(obs, actions)
    ratio = (new_log_prob - log_probs).exp()
    pg_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
    new_value = new_value.view(-1)
    clipped = values + torch.clamp(new_value - values, -0.2, 0.2)
    v_loss = 0.5 * torch.max((new_value - returns) ** 2, (clipped - returns) ** 2).mean()
    loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
