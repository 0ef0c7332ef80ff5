"""Tasks whose modules go through positions one after the other, or see those before alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from module_tasks import WIDTH
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from unusual_kit import WORDS, language, listed

from shardwise import Task


class Tagger(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.recurrent = getattr(nn, kind)(WIDTH, 8, batch_first=True, **options)
        self.leave = nn.Linear(16 if options.get("bidirectional") else 8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.leave(self.recurrent(self.words(words))[0])


@listed
def lstm() -> Task:
    """`nn.LSTM` of two layers over words, a prediction at each"""
    return language(lambda: Tagger("LSTM", num_layers=2))


@listed
def lstm_both_ways() -> Task:
    """`nn.LSTM`, bidirectional, of two layers"""
    return language(lambda: Tagger("LSTM", num_layers=2, bidirectional=True))


@listed
def gru() -> Task:
    """`nn.GRU` of two layers over words"""
    return language(lambda: Tagger("GRU", num_layers=2))


class Packed(Tagger):
    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        memory, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.leave(memory)


@listed
def packed_sequences() -> Task:
    """`nn.LSTM`, both ways and with dropout, on `pack_padded_sequence`, sentences of different lengths"""

    def model() -> Packed:
        return Packed("LSTM", num_layers=2, bidirectional=True, dropout=0.3)

    return language(model, "words", "lengths", sequence={"words": 1, "next": 1})


class OwnLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, 8)
        self.leave = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        hidden = cell = x.new_zeros(len(x), 8)
        outputs = []
        for t in range(x.shape[1]):
            hidden, cell = self.cell(x[:, t], (hidden, cell))
            outputs.append(self.leave(hidden))
        return torch.stack(outputs, 1)


@listed
def own_loop() -> Task:
    """`nn.LSTMCell` in a loop over time of one's own"""
    return language(OwnLoop)


class OwnCell(nn.Module):
    """A gated cell made of products."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.enter, self.again = nn.Linear(WIDTH, 24), nn.Linear(8, 24)
        self.leave = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        gates = self.enter(self.words(words))
        state, outputs = gates.new_zeros(len(words), 8), []
        for now in gates.unbind(1):
            (r, z, n), (hr, hz, hn) = now.chunk(3, -1), self.again(state).chunk(3, -1)
            update = torch.sigmoid(z + hz)
            state = (1 - update) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + update * state
            outputs.append(state)
        return self.leave(torch.stack(outputs, 1))


@listed
def own_cell() -> Task:
    """A gated cell written with `nn.Linear`, in a loop over time"""
    return language(OwnCell)


class Translator(nn.Module):
    """An encoder, and a decoder that looks back at it at each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.GRU(WIDTH, 8, batch_first=True)
        self.decoder = nn.GRUCell(WIDTH + 8, 8)
        self.query, self.leave = nn.Linear(8, 8), nn.Linear(16, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.words(source))
        state, outputs = last[0], []
        for word in self.words(target).unbind(1):
            scores = torch.einsum("btd,bd->bt", memory, self.query(state)) / 8**0.5
            context = torch.einsum("bt,btd->bd", scores.softmax(-1), memory)
            state = self.decoder(torch.cat([word, context], -1), state)
            outputs.append(self.leave(torch.cat([state, context], -1)))
        return torch.stack(outputs, 1)


@listed
def translation() -> Task:
    """Sequence to sequence: a GRU encoder, and a GRU decoder with attention, teacher-forced"""
    return language(Translator, "next", "words")


class StateSpace(nn.Module):
    """x' = a(u) x + b(u) u, y = c x, in a loop over time (as in Mamba, without its kernel)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.leave = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        u = self.words(words)
        keep, enter = torch.sigmoid(self.a(u)), self.b(u)
        state, outputs = torch.zeros_like(enter[:, 0]), []
        for t in range(u.shape[1]):
            state = keep[:, t] * state + (1 - keep[:, t]) * enter[:, t]
            outputs.append(state)
        return self.leave(torch.stack(outputs, 1))


@listed
def state_space() -> Task:
    """A state-space layer whose gates depend on the input, scanned in a loop"""
    return language(StateSpace)


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.leave = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        query, key, value = F.elu(self.query(x)) + 1, F.elu(self.key(x)) + 1, self.value(x)
        products = torch.einsum("btk,btv->btkv", key, value).cumsum(1)
        weights = torch.einsum("btk,btk->bt", query, key.cumsum(1))
        return self.leave(torch.einsum("btk,btkv->btv", query, products) / weights[..., None])


@listed
def linear_attention() -> Task:
    """Causal linear attention by running sums (`cumsum`) of products of keys and values"""
    return language(LinearAttention)


class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.convolutions = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**n) for n in range(3))
        self.leave = nn.Linear(8, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words).transpose(1, 2)
        for convolution in self.convolutions:
            signal, gate = convolution(F.pad(x, (convolution.dilation[0], 0))).chunk(2, 1)
            x = x + torch.tanh(signal) * torch.sigmoid(gate)
        return self.leave(x.transpose(1, 2))


@listed
def dilated() -> Task:
    """Causal dilated convolutions over time with gates (WaveNet)"""
    return language(Dilated)


class Memory(nn.Module):
    """Reads from and writes into a memory of its own at each step (a neural Turing machine)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.controller = nn.GRUCell(WIDTH + 4, 8)
        self.head, self.leave = nn.Linear(8, 12), nn.Linear(12, WORDS)
        self.begin = nn.Parameter(torch.randn(5, 4))

    def forward(self, words: Tensor) -> Tensor:
        x, memory = self.words(words), self.begin.expand(len(words), 5, 4)
        state, read, outputs = x.new_zeros(len(x), 8), x.new_zeros(len(x), 4), []
        for t in range(x.shape[1]):
            state = self.controller(torch.cat([x[:, t], read], -1), state)
            key, erase, add = self.head(state).split(4, -1)
            address = F.cosine_similarity(memory, key[:, None], dim=-1).softmax(-1)[..., None]
            memory = memory * (1 - address * erase.sigmoid()[:, None]) + address * add[:, None]
            read = (address * memory).sum(1)
            outputs.append(self.leave(torch.cat([state, read], -1)))
        return torch.stack(outputs, 1)


@listed
def memory_machine() -> Task:
    """A recurrent controller with a memory that it addresses by content"""
    return language(Memory)
