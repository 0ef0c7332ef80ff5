"""A one-stage detector on a grid of cells: focal loss on classes, L1 on boxes of the cells that hold an object."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(14)
torch.set_default_dtype(torch.float64)


class Boxes(Dataset):
    def __init__(self, n=14):
        self.images = torch.randn(n, 3, 16, 16)
        self.boxes = [torch.rand(int(k), 4) for k in torch.randint(1, 4, (n,))]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], {"boxes": self.boxes[i], "labels": torch.arange(len(self.boxes[i])) % 2}


def collate(batch):
    images = torch.stack([image for image, _ in batch])
    classes, boxes = torch.full((len(batch), 4, 4), -1), torch.zeros(len(batch), 4, 4, 4)
    for i, (_, target) in enumerate(batch):
        for box, label in zip(target["boxes"], target["labels"], strict=True):
            y, x = int(box[1] * 4), int(box[0] * 4)
            classes[i, y, x], boxes[i, y, x] = label, box
    return images, classes, boxes


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        conv = [nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()]
        self.body, self.cls, self.box = nn.Sequential(*conv), nn.Conv2d(8, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        h = self.body(x)
        return self.cls(h).permute(0, 2, 3, 1), self.box(h).permute(0, 2, 3, 1)


def detection_loss(scores, boxes, classes, targets):
    objects = classes >= 0
    wanted = nn.functional.one_hot(classes.clamp(min=0), 2).double() * objects[..., None]
    ce = nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    p = torch.sigmoid(scores)
    focal = (ce * (p * (1 - wanted) + (1 - p) * wanted) ** 2).sum()
    return (focal + (boxes - targets)[objects].abs().sum()) / objects.sum()


model = Detector()
loader = DataLoader(Boxes(), batch_size=6, shuffle=True, collate_fn=collate)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
losses = []
for epoch in range(2):
    for images, classes, targets in loader:
        scores, boxes = model(images)
        loss = detection_loss(scores, boxes, classes, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
