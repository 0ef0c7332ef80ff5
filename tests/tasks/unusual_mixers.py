"""Tasks that mix positions without plain attention: mixers, kernels, hashes, retention, state spaces, memories."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from module_tasks import OUT, images, task
from torch import Tensor, nn
from unusual_kit import LENGTH, SAMPLES, WORDS, draws, language, listed, sentences

from shardwise import Task

D = 8  # features of a position


class Words(nn.Module):
    """Words, residual blocks, a prediction at each."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, D), nn.Parameter(torch.randn(LENGTH, D) * 0.1)
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in blocks)
        self.leave = nn.Linear(D, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.places
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.leave(x)


class Turned(nn.Module):
    """A net over positions: features last, positions mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LENGTH, 12), nn.GELU(), nn.Linear(12, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mT).mT


def _feed() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D))


@listed
def mixer() -> Task:
    """Nets over positions and over features in turn (MLP-Mixer)"""
    return language(lambda: Words(Turned(), _feed(), Turned(), _feed()))


class Gate(nn.Module):
    """Half of the features gate the other half, mapped over positions by a convolution of size one (gMLP)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.norm = nn.Linear(D, 16), nn.Linear(8, D), nn.LayerNorm(8)
        self.spatial = nn.Conv1d(LENGTH, LENGTH, 1)
        nn.init.constant_(self.spatial.bias, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = F.gelu(self.enter(x)).chunk(2, dim=-1)
        return self.leave(kept * self.spatial(self.norm(gate)))


@listed
def gated_mixer() -> Task:
    """Features gated by others that are mapped over positions (gMLP)"""
    return language(lambda: Words(Gate(), Gate()))


class Waves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real


@listed
def fourier_mixer() -> Task:
    """Positions and features mixed by Fourier transforms without weights (FNet)"""
    return language(lambda: Words(Waves(), _feed(), Waves(), _feed()))


class Projected(nn.Module):
    """Attention whose keys and values are mapped to fewer positions, by one weight for both (Linformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.fewer = nn.Parameter(torch.randn(LENGTH, 3) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 2, 4).transpose(1, 2)
        k, v = (torch.einsum("bsd,sk->bkd", each(x), self.fewer).view(b, 3, 2, 4).transpose(1, 2)
                for each in (self.k, self.v))  # fmt: skip
        mixed = (q @ k.mT / 2).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, s, D))


@listed
def projected_attention() -> Task:
    """Attention over positions mapped to fewer by a weight (Linformer)"""
    return language(lambda: Words(Projected(), _feed(), Projected()))


class RandomFeatures(nn.Module):
    """Attention by random features of queries and keys, which are a buffer (Performer), causal by running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.register_buffer("features", torch.linalg.qr(torch.randn(4, 4))[0] * 2)

    def _kernel(self, x: Tensor) -> Tensor:
        return torch.exp(x @ self.features.T - x.square().sum(-1, keepdim=True) / 2) + 1e-4

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (each.view(b, s, 2, 4) for each in self.qkv(x).chunk(3, dim=-1))
        q, k = self._kernel(q * 0.5), self._kernel(k * 0.5)
        sums = torch.einsum("bshf,bshd->bshfd", k, v).cumsum(1)
        mixed = torch.einsum("bshf,bshfd->bshd", q, sums) / torch.einsum("bshf,bshf->bsh", q, k.cumsum(1))[..., None]
        return self.out(mixed.reshape(b, s, D))


@listed
def random_features() -> Task:
    """Attention by random features that are a buffer, causal by running sums (Performer)"""
    return language(lambda: Words(RandomFeatures(), _feed()))


class Hashed(nn.Module):
    """Positions sorted by a hash of their features; each attends to its bucket (Reformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.out = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.register_buffer("directions", torch.randn(D, 2))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        qk, v = self.qk(x), self.v(x)
        turned = qk @ self.directions
        bucket = torch.cat([turned, -turned], -1).argmax(-1)
        order = (bucket * s + torch.arange(s)).argsort(-1)
        back = order.argsort(-1)
        qk, v = (each.gather(1, order[..., None].expand_as(each)).view(b, 2, s // 2, D) for each in (qk, v))
        scores = qk @ F.normalize(qk, dim=-1).mT / math.sqrt(D)
        mixed = (scores.softmax(-1) @ v).view(b, s, D)
        return self.out(mixed.gather(1, back[..., None].expand_as(mixed)))


@listed
def hashed_attention() -> Task:
    """Attention within buckets of positions that are sorted by a hash (Reformer)"""
    return language(lambda: Words(Hashed(), _feed()))


class Retention(nn.Module):
    """Attention without softmax, its scores decaying by distance, a rate for each head; a norm over groups (RetNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.gate, self.out = (nn.Linear(D, D, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(2, D)
        self.register_buffer("rates", torch.log(1 - 2.0 ** (-3 - torch.arange(2.0))))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        apart = (torch.arange(s)[:, None] - torch.arange(s)).to(x.dtype)
        decay = torch.where(apart >= 0, torch.exp(self.rates[:, None, None] * apart), 0)
        q, k, v = (each(x).view(b, s, 2, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = ((q @ k.mT * 0.5) * decay) @ v
        mixed = self.norm(mixed.transpose(1, 2).reshape(b * s, D)).view(b, s, D)
        return self.out(F.silu(self.gate(x)) * mixed)


@listed
def retention() -> Task:
    """Retention: scores that decay by distance, and a norm over groups of heads (RetNet)"""
    return language(lambda: Words(Retention(), _feed()))


class Poles(nn.Module):
    """A state space of complex poles, applied as a long convolution by Fourier transforms (S4D)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(D) - 2)
        self.real, self.imag = nn.Parameter(torch.zeros(D, 4)), nn.Parameter(math.pi * torch.arange(4.0).repeat(D, 1))
        self.c, self.skip = nn.Parameter(torch.randn(D, 4, 2)), nn.Parameter(torch.randn(D))
        self.out = nn.Linear(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        s = x.shape[1]
        poles = torch.complex(-self.real.exp(), self.imag)
        steps = poles * self.log_step.exp()[:, None]
        c = torch.view_as_complex(self.c) * (steps.exp() - 1) / poles
        kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(steps[..., None] * torch.arange(s))).real
        waves = torch.fft.rfft(x.mT, n=2 * s) * torch.fft.rfft(kernel, n=2 * s)
        y = torch.fft.irfft(waves, n=2 * s)[..., :s] + x.mT * self.skip[:, None]
        return F.glu(self.out(F.gelu(y).mT), dim=-1)


@listed
def state_space_by_waves() -> Task:
    """A state space of complex poles as a long convolution (S4D)"""
    return language(lambda: Words(Poles(), _feed()))


class MemoryNet(nn.Module):
    """Hops over a memory of sentences, the output table of one hop being the input table of the next (MemN2N)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(WORDS, D, padding_idx=0) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        memory, question = words[:, :6].unflatten(1, (3, 2)), words[:, 6:]
        u = self.tables[0](question).sum(1)
        for before, after in zip(self.tables, list(self.tables)[1:], strict=False):
            p = torch.einsum("bnd,bd->bn", before(memory).sum(2), u).softmax(-1)
            u = u + torch.einsum("bn,bnd->bd", p, after(memory).sum(2))
        return F.linear(u, self.tables[-1].weight)


def _last_word(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch["next"][:, -1], reduction="sum"), len(output)


@listed
def memory_hops() -> Task:
    """Hops over a memory, tables of one hop shared with the next and with the output (MemN2N)"""
    return task(MemoryNet, sentences, loss=_last_word, inputs=lambda batch: ((batch["words"],), {}))


class SharedBlock(nn.Module):
    """One block run four times, each with an offset of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.offsets = nn.Parameter(torch.randn(4, D) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        for offset in self.offsets:
            x = self.block(x + offset)
        return x


@listed
def shared_block() -> Task:
    """One block of a transformer run four times (ALBERT, universal transformers)"""
    return language(lambda: Words(SharedBlock()))


class Latents(nn.Module):
    """Learned points that attend to the input twice by the same weights (Perceiver)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.points = nn.Linear(3, D), nn.Parameter(torch.randn(4, D))
        self.cross = nn.MultiheadAttention(D, 1, kdim=D, vdim=D, batch_first=True)
        self.inner = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True)
        self.leave = nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        cells = self.enter(x.flatten(2).mT)
        z = self.points.expand(len(x), -1, -1)
        for _ in range(2):
            z = self.inner(z + self.cross(z, cells, cells)[0])
        return self.leave(z.mean(1))


@listed
def latent_points() -> Task:
    """Learned points that attend to all pixels, twice by the same weights (Perceiver)"""
    return task(Latents, images)


class Triangles(nn.Module):
    """Features of pairs, updated over all triangles (the pair stack of a structure predictor)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(3, D), nn.LayerNorm(D)
        self.a, self.b, self.gate, self.out = (nn.Linear(D, D) for _ in range(4))
        self.leave = nn.Linear(D, OUT)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        z = h[:, :, None] * h[:, None]
        n = self.norm(z)
        outgoing = torch.einsum("bikc,bjkc->bijc", self.a(n).sigmoid() * n, self.b(n))
        z = z + self.gate(n).sigmoid() * self.out(outgoing)
        return self.leave(z.mean(dim=(1, 2)))


def _cloud(step: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(SAMPLES, 5, 3, generator=draws(step)),
        "y": torch.randn(SAMPLES, OUT, generator=draws(step + 50)),
    }


@listed
def triangles() -> Task:
    """Features of pairs updated over all triangles of them (`einsum` over four indices)"""
    return task(Triangles, _cloud)


class Sorting(nn.Module):
    """Positions put into a soft order by rows and columns normed in turn (Sinkhorn)."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.mix = nn.Linear(D, LENGTH), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        logs = self.scores(x)
        for _ in range(5):
            logs = logs - logs.logsumexp(-1, keepdim=True)
            logs = logs - logs.logsumexp(-2, keepdim=True)
        return self.mix(logs.exp() @ x)


@listed
def soft_order() -> Task:
    """Positions in a soft order by Sinkhorn's iterations"""
    return language(lambda: Words(Sorting(), _feed()))
