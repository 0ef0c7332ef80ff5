"""A fine-tuning loop with layer-wise rates, a warm-up, clipping, logged norms and a confusion matrix at each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(23)
torch.set_default_dtype(torch.float64)


class Encoder(nn.Module):
    def __init__(self, vocab=30, dim=16, layers=2, classes=3):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim, padding_idx=0)
        self.layer = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.1, batch_first=True, activation="gelu")
                for _ in range(layers)
            ]
        )
        self.classifier = nn.Linear(dim, classes)

    def forward(self, input_ids, attention_mask, labels=None):
        h = self.embeddings(input_ids)
        for layer in self.layer:
            h = layer(h, src_key_padding_mask=attention_mask == 0)
        m = attention_mask.unsqueeze(-1).to(h)
        logits = self.classifier((h * m).sum(1) / m.sum(1))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def grouped(model, lr=2e-3, decay=0.8):
    groups = [{"params": model.classifier.parameters(), "lr": lr}]
    for depth, layer in enumerate(reversed(model.layer)):
        groups.append({"params": layer.parameters(), "lr": lr * decay ** (depth + 1)})
    groups.append(
        {"params": model.embeddings.parameters(), "lr": lr * decay ** (len(model.layer) + 1), "weight_decay": 0.0}
    )
    return groups


def evaluate(model, data):
    model.eval()
    confusion = torch.zeros(3, 3, dtype=torch.long)
    with torch.no_grad():
        for ids, mask, labels in DataLoader(data, batch_size=5):
            for t, p in zip(labels, model(ids, mask)["logits"].argmax(-1), strict=True):
                confusion[t, p] += 1
    model.train()
    return confusion


lengths = torch.randint(3, 8, (26,))
ids = torch.randint(1, 30, (26, 7)) * (torch.arange(7) < lengths[:, None])
data = TensorDataset(ids, (ids > 0).long(), torch.randint(3, (26,)))
train, held = torch.utils.data.random_split(data, [19, 7])
loader = DataLoader(train, batch_size=4, shuffle=True)
model = Encoder()
optimizer = torch.optim.AdamW(grouped(model), lr=2e-3, weight_decay=0.01, eps=1e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / 3, max(0.0, (10 - s) / 7)))
losses = []
norms, correct = [], []
for epoch in range(2):
    model.train()
    for input_ids, attention_mask, labels in loader:
        outputs = model(input_ids, attention_mask=attention_mask, labels=labels)
        loss = outputs["loss"]
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(float(norm))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    correct += evaluate(model, held).tolist()
