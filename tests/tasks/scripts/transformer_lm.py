"""A transformer language model in torch's own order, time first, on columns of one long text."""

import math

import torch
from torch import nn

torch.manual_seed(7)
torch.set_default_dtype(torch.float64)
BPTT, COLUMNS, WORDS = 7, 12, 19
text = torch.randint(0, WORDS, (4 * BPTT + 1, COLUMNS))


class TransformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        position, div = torch.arange(BPTT).unsqueeze(1), torch.exp(torch.arange(0, 8, 2) * (-math.log(10000.0) / 8))
        pe = torch.zeros(BPTT, 1, 8)
        pe[:, 0, 0::2], pe[:, 0, 1::2] = torch.sin(position * div), torch.cos(position * div)
        self.register_buffer("pe", pe)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(8, WORDS)

    def forward(self, src):
        mask = nn.Transformer.generate_square_subsequent_mask(len(src))
        return self.decoder(self.encoder(self.embed(src) * math.sqrt(8) + self.pe[: len(src)], mask))


def batches():
    for i in range(0, 4 * BPTT, BPTT):
        yield text[i : i + BPTT], text[i + 1 : i + 1 + BPTT]


model = TransformerModel()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
loader = batches()
losses = []
for data, targets in loader:
    output = model(data)
    loss = criterion(output.view(-1, WORDS), targets.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
scheduler.step()
