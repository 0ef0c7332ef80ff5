"""Segmentation with binary cross-entropy and the dice of the whole batch, as the most copied U-Net has it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
torch.set_default_dtype(torch.float64)
images, masks = torch.randn(16, 1, 8, 8), torch.randint(0, 2, (16, 8, 8)).double()
loader = DataLoader(TensorDataset(images, masks), batch_size=8, shuffle=True)


def dice_coeff(input, target, epsilon=1e-6):
    inter = 2 * (input * target).sum(dim=(-1, -2, -3))
    sets_sum = input.sum(dim=(-1, -2, -3)) + target.sum(dim=(-1, -2, -3))
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def dice_loss(input, target):
    return 1 - dice_coeff(input, target)


model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)
)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, eps=1e-4)
losses = []
for images, true_masks in loader:
    masks_pred = model(images)
    loss = criterion(masks_pred.squeeze(1), true_masks)
    loss += dice_loss(F.sigmoid(masks_pred.squeeze(1)), true_masks)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
