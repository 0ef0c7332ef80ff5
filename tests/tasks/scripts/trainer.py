"""A trainer class of one's own around a compiled model, with an average of weights kept by hand as timm keeps it."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(28)
torch.set_default_dtype(torch.float64)


class ModelEma:
    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mine, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(self.decay * mine + (1 - self.decay) * value)


class Trainer:
    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)

    def training_step(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def fit(self, epochs):
        history = []
        for _ in range(epochs):
            for batch in self.loader:
                loss = self.training_step(batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                ema.update(self.model)
                history.append(loss.item())
        return history


x = torch.randn(20, 4)
loader = DataLoader(TensorDataset(x, x.cos()), batch_size=7, shuffle=True)
model = torch.compile(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)), backend="eager")
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2, eps=1e-4)
ema = ModelEma(model)
losses = []
losses += Trainer(model, optimizer, loader).fit(2)
made = torch.cat([value.flatten() for value in ema.module.state_dict().values()])
