"""Truncated backpropagation: columns of text, whose hidden state goes on from batch to batch."""

import torch
from torch import nn

torch.manual_seed(26)
torch.set_default_dtype(torch.float64)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def batches(source, bptt=5):
    return [(source[i : i + bptt], source[i + 1 : i + 1 + bptt]) for i in range(0, source.size(0) - 1 - bptt, bptt)]


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


class RNNModel(nn.Module):
    def __init__(self, ntoken=17, ninp=8, nhid=12, nlayers=2):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(ntoken, ninp)
        self.rnn, self.decoder = nn.LSTM(ninp, nhid, nlayers, dropout=0.2), nn.Linear(nhid, ntoken)
        self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return self.decoder(self.drop(output)).view(-1, self.ntoken), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


loader = batches(batchify(torch.randint(17, (170,)), 4))
model = RNNModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for epoch in range(2):
    hidden = None
    for data, targets in loader:
        hidden = repackage_hidden(hidden) if hidden is not None else model.init_hidden(data.size(1))
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        loss = nn.functional.cross_entropy(output, targets.reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss.item())
