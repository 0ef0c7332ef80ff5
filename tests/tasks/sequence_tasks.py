"""Tasks whose samples are sequences, for plans that cut them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from shardwise import Task

VOCABULARY, LENGTH = 17, 10


class PositionWise(nn.Module):
    """Every position by itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # (B, S, 5) -> (B, S, 3)


def _squares(output: torch.Tensor, batch: dict) -> tuple:
    return (output - batch["y"]).square().sum(), float(output.shape[0])


def _fields(step: int) -> dict:
    draws = torch.Generator().manual_seed(step)
    return {"x": torch.randn(6, LENGTH + 1, 5, generator=draws), "y": torch.randn(6, LENGTH + 1, 3, generator=draws)}


def position_wise() -> Task:
    return Task(model=PositionWise, batch=_fields, inputs=lambda batch: ((batch["x"],), {}), loss=_squares,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


def _square(step: int) -> dict:
    return {name: tensor[:, :5] for name, tensor in _fields(step).items()}


def square() -> Task:
    """As many positions as features."""
    return position_wise().with_(batch=_square)


def square_turned() -> Task:
    """The same, features first."""
    return square().with_(
        model=lambda: nn.Sequential(nn.Conv1d(5, 8, 3, padding=1), nn.GELU(), nn.Conv1d(8, 3, 1)),
        loss=lambda output, batch: _squares(output.mT, batch),
    )


class OneLength(PositionWise):
    """With a table that has the length of the sequence, so that it does not run on half of one."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(LENGTH + 1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.places)


def one_length() -> Task:
    return position_wise().with_(model=OneLength)


class OfPairs(nn.Module):
    """Of pairs of positions (B, S, S, 5), of which it asserts the size."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == x.shape[2] == 4, "four by four"
        return self.layer(x.mean(2))


def _pairs(step: int) -> dict:
    draws = torch.Generator().manual_seed(step)
    return {"x": torch.randn(6, 4, 4, 5, generator=draws), "y": torch.randn(6, 4, 3, generator=draws)}


def of_pairs() -> Task:
    """Which of the two dims the target has is seen by its size alone."""
    return position_wise().with_(model=OfPairs, batch=_pairs)


def of_pairs_alone() -> Task:
    return of_pairs().with_(batch=lambda step: {"x": (x := _pairs(step)["x"]), "y": x.mean()[None].expand(6)},
                            loss=lambda output, batch: _squares(output.mean((1, 2)), batch))  # fmt: skip


def of_pairs_named() -> Task:
    return of_pairs_alone().with_(sequence={"x": 1})


class Penalised(PositionWise):
    """With a penalty on its weights, read past their attributes or by these."""

    def __init__(self, past: bool):
        super().__init__()
        self.past = past

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.parameters() if self.past else (self.layers[0].weight, self.layers[3].weight)
        return self.layers(x) + sum(weight.square().sum() for weight in weights)


def penalised() -> Task:
    return position_wise().with_(model=lambda: Penalised(False))


def penalised_past_attributes() -> Task:
    return position_wise().with_(model=lambda: Penalised(True))


def one_length_named() -> Task:
    return one_length().with_(sequence={"x": 1, "y": 1})


class Block(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, written: bool, causal: bool):
        super().__init__()
        self.heads, self.key_heads, self.written, self.causal = heads, key_heads, written, causal
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        each = width // heads
        self.q = nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, each * key_heads), nn.Linear(width, each * key_heads)
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, s, width = x.shape
        h = self.norm(x)
        q = self.q(h).view(b, s, self.heads, -1).transpose(1, 2)
        k = self.k(h).view(b, s, self.key_heads, -1).transpose(1, 2)
        v = self.v(h).view(b, s, self.key_heads, -1).transpose(1, 2)
        if self.written:
            k, v = (t.repeat_interleave(self.heads // self.key_heads, 1) for t in (k, v))
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            allowed = torch.ones(s, s, dtype=torch.bool, device=q.device).tril() if mask is None else mask
            a = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
        else:
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None,
                                               enable_gqa=self.heads != self.key_heads)  # fmt: skip
        x = x + self.o(a.transpose(1, 2).reshape(b, s, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    def __init__(self, heads: int = 4, key_heads: int = 4, written: bool = False, window: int = 0, causal: bool = True):
        super().__init__()
        self.window = window
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(16, heads, key_heads, written, causal) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        s = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(s, device=tokens.device))
        mask = None
        if self.window:
            at = torch.arange(s, device=tokens.device)
            mask = (at[:, None] >= at) & (at[:, None] - at < self.window)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class LongWindow(Decoder):
    """A window given as a mask, for sequences of any length."""

    def __init__(self):
        super().__init__(window=3)
        self.places = nn.Embedding(2**13, 16)


def _next(logits: torch.Tensor, batch: dict) -> tuple:
    target = batch["tokens"][:, 1:]
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), target.reshape(-1), reduction="sum")
    return loss, float(target.shape[0] * target.shape[1])


def _text(step: int) -> dict:
    return {"tokens": torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))}


def _task(**options) -> Task:
    return Task(model=lambda: Decoder(**options), batch=_text, inputs=lambda batch: ((batch["tokens"],), {}),
                loss=_next, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


def decoder() -> Task:
    return _task()


def grouped() -> Task:
    return _task(key_heads=2)


def one_key_head() -> Task:
    return _task(key_heads=1)


def written() -> Task:
    return _task(written=True)


def windowed() -> Task:
    return _task(window=3)


def encoder() -> Task:
    return _task(causal=False)


class Words(nn.Module):
    """A vocabulary and nothing that repeats: if its tokens cannot be cut, nothing can."""

    def __init__(self):
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        self.teacher = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.mix(self.tokens(tokens)).tanh()
        return self.head(x), self.teacher(x)


def _as_people_write_them(output: tuple, batch: dict) -> tuple:
    """Losses of the next token: logits before the last position beside tokens behind the first one."""
    logits, teacher = (each[:, :-1] for each in output)
    target, kept = batch["tokens"][:, 1:], batch["tokens"][:, 1:] % 3 != 0
    flat, flat_target, ignored = logits.flatten(0, 1), target.flatten(), target.masked_fill(~kept, -100)
    classes = torch.linspace(0.5, 2, VOCABULARY, dtype=logits.dtype)
    smooth = {"label_smoothing": 0.1}
    each = F.cross_entropy(logits.transpose(1, 2), target, reduction="none", **smooth)
    entries = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    student, taught = (F.log_softmax(x.reshape(-1, VOCABULARY), -1) for x in (logits, teacher))
    count = kept.sum()
    losses = [
        F.cross_entropy(flat, flat_target, reduction="sum", **smooth),
        F.cross_entropy(flat, ignored.flatten(), **smooth) * count,
        F.cross_entropy(flat, flat_target, weight=classes, reduction="sum", **smooth),
        flat.logsumexp(-1).square().sum() / 100,
        -((1 - entries.exp()) ** 2 * entries).sum(),
        F.kl_div(student, taught, log_target=True, reduction="sum"),
        (each * kept).sum(),
        (each.sum(1) / each.shape[1]).square().sum(),
        F.cross_entropy(logits[kept], target[kept], reduction="sum", **smooth),
        -(F.one_hot(target, VOCABULARY).to(logits.dtype) * student.view_as(logits)).sum(),
        F.nll_loss(student[:, 1:], flat_target.clamp(max=VOCABULARY - 2), reduction="sum"),
        F.cross_entropy(output[0].view(-1, VOCABULARY), F.pad(target, (0, 1), value=-100).view(-1), **smooth)
        * flat_target.numel(),
    ]
    return sum(losses), float(target.shape[0])


def losses() -> Task:
    return Task(model=Words, batch=_text, inputs=lambda batch: ((batch["tokens"],), {}), loss=_as_people_write_them,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


class Convolution(nn.Module):
    """Mixes neighbouring positions."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Conv1d(5, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(x.transpose(1, 2)).transpose(1, 2))


def convolution() -> Task:
    return Task(model=Convolution, batch=_fields, inputs=lambda batch: ((batch["x"],), {}), loss=_squares,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


class OneForAll(Convolution):
    """Every position reads the first, the last and another one, as slices of one position."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        first, last = x[:, :1], x[:, -1:].expand_as(x)
        weights = torch.linspace(0.1, 1, x.shape[1], dtype=x.dtype).view(1, -1, 1)
        return self.out(torch.where(x > first, x - first, x * last) + x[:, 4:5].tanh() * weights)


def one_for_all() -> Task:
    return convolution().with_(model=OneForAll)


class Single(Decoder):
    """Has a kernel without float64."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        if logits.dtype == torch.float64:
            raise NotImplementedError('"single" not implemented for Double')
        return logits


def single() -> Task:
    return _task().with_(model=Single, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))


class DeltaRule(nn.Module):
    """A memory that a loop over positions corrects, read by contractions of one position's heads."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(5, 24), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(*x.shape[:2], 2, 4).transpose(1, 2) for each in self.mix(x).chunk(3, -1))
        k, memory, read = F.normalize(k, dim=-1), x.new_zeros(len(x), 2, 4, 4), []
        for n in range(x.shape[1]):
            wrong = v[:, :, n] - torch.einsum("bhd,bhde->bhe", k[:, :, n], memory)
            memory = memory + torch.einsum("bhd,bhe->bhde", k[:, :, n], wrong)
            read.append(torch.einsum("bhd,bhde->bhe", q[:, :, n], memory))
        return self.out(torch.stack(read, 2).transpose(1, 2).flatten(2))


def delta_rule() -> Task:
    return convolution().with_(model=DeltaRule)


class RunningSums(Convolution):
    """Each position reads all before it: running sums, and a gated recurrence written with them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        kept = F.logsigmoid(self.gate(x)).cumsum(1)  # log of the product of gates: h_t = a_t h_(t-1) + x_t
        return self.out(kept.exp() * (x * (-kept).exp()).cumsum(1))


def running_sums() -> Task:
    return replace(convolution(), model=RunningSums)


class Recurrent(RunningSums):
    """The same recurrence as a loop over positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        kept, state, states = self.gate(x).sigmoid(), torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            state = kept[:, at] * state + x[:, at]
            states.append(state)
        return self.out(torch.stack(states, 1))


def recurrent() -> Task:
    return replace(convolution(), model=Recurrent)


class Decays(RunningSums):
    """Decays between all pairs of positions, a recurrence in logarithms, and a group norm of each position."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        kept = F.logsigmoid(self.gate(x)).cumsum(1)
        decays = (kept[..., None, :, :] - kept[..., None, :]).mean(-1)  # (B, S, S): from a column's position to a row's
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = decays.mT.masked_fill(later, -torch.inf).exp() @ x + (kept + (x - kept).logcumsumexp(1)).tanh()
        return self.out(self.norm(x.flatten(0, 1)).view_as(x))


def decays() -> Task:
    return replace(convolution(), model=Decays)


class HandsOn(nn.Module):
    """A layer that narrows what it is given, and hands on a wide tensor beside it."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(24, 5), nn.Linear(5, 24)

    def forward(self, x: torch.Tensor, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.down(F.gelu(wide))
        return x, self.up(x)


class HandedOn(nn.Module):
    """Layers that hand on wide tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.layers, self.out = (
            nn.Linear(5, 24),
            nn.ModuleList(HandsOn() for _ in range(3)),
            nn.Linear(5, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x)
        for layer in self.layers:
            x, wide = layer(x, wide)
        return self.out(x)


def handed_on() -> Task:
    return replace(convolution(), model=HandedOn)


class BatchFirst(nn.Module):
    """A recurrent layer of torch's, which turns its result in place."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(x)[0])


def batch_first() -> Task:
    return replace(convolution(), model=BatchFirst)


class RunningExtremes(Convolution):
    """Each position reads all before it: products of gates, and the largest and smallest value so far."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        kept = self.gate(x).sigmoid().add(0.5).cumprod(1)
        return self.out(kept * x + x.cummax(1).values - x.cummin(1).values)


def running_extremes() -> Task:
    return replace(convolution(), model=RunningExtremes)


class Sorted(Convolution):
    """Each feature of all positions in the order of its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(x.transpose(1, 2)).transpose(1, 2).sort(1).values)


def sorted_positions() -> Task:
    return replace(convolution(), model=Sorted)


class Energy(Convolution):
    """Each position reads all others, in a way that no rule knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.out(h / torch.vdot(h.flatten(), h.flatten()))


def energy() -> Task:
    return replace(convolution(), model=Energy)


class Spectrum(nn.Module):
    """Mixes all positions by a transform."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.fft.fft(x, dim=1).real)


def spectrum() -> Task:
    return Task(model=Spectrum, batch=_fields, inputs=lambda batch: ((batch["x"],), {}), loss=_squares,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


class Ordered(nn.Module):
    """Sorts along positions."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.sort(1).values)


def ordered() -> Task:
    return Task(model=Ordered, batch=_fields, inputs=lambda batch: ((batch["x"],), {}), loss=_squares,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


class Picked(nn.Module):
    """Reads channels by an index, whose gradient is put back."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(5, 6), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.first(x)[:, :, [0, 5, 2]])


def picked() -> Task:
    return Task(model=Picked, batch=_fields, inputs=lambda batch: ((batch["x"],), {}), loss=_squares,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


class Pooled(nn.Module):
    """A classifier of sequences: of their mean, and of their last position."""

    def __init__(self):
        super().__init__()
        self.tokens, self.block = nn.Embedding(VOCABULARY, 16), Block(16, 4, 4, False, False)
        self.mean, self.last = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.block(self.tokens(tokens), None)
        return self.mean(x.mean(1)) + self.last(x[:, -1]).tanh()


def _classes(logits: torch.Tensor, batch: dict) -> tuple:
    return F.cross_entropy(logits, batch["tokens"][:, 0] % 3, reduction="sum"), float(logits.shape[0])


def pooled() -> Task:
    return Task(model=Pooled, batch=_text, inputs=lambda batch: ((batch["tokens"],), {}), loss=_classes,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


class Routed(nn.Module):
    """A decoder whose second block's feed-forward network is one of routed experts."""

    def __init__(self):
        super().__init__()
        from shardwise.models.moe import Experts

        self.body, self.router, self.experts = Decoder(), nn.Linear(16, 4), Experts(4, 16, 5)
        self.body.head = nn.Identity()
        self.head = nn.Linear(16, VOCABULARY)
        for param in self.experts.parameters():
            nn.init.normal_(param, std=0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body(tokens)  # (B, S, H)
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        index = scores.detach().topk(2).indices
        return self.head(x + self.experts(rows, index, scores.gather(-1, index)).view_as(x))


def routed() -> Task:
    return Task(model=Routed, batch=_text, inputs=lambda batch: ((batch["tokens"],), {}), loss=_next,
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


def three_words() -> Task:
    """A sequence of which one rank of two has two positions and the other one, which may lie in memory in many ways."""
    import architectures

    return architectures.llama().with_(batch=lambda step: {k: t[:, :3] for k, t in architectures.words(step).items()})


class TwoLengths(nn.Module):
    """Reads a long sequence and a short one, each by attention of its own."""

    def __init__(self):
        super().__init__()
        self.long, self.short = Block(16, 4, 4, False, True), Block(16, 4, 4, False, True)
        self.tokens, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor, notes: torch.Tensor) -> torch.Tensor:
        note = self.short(self.tokens(notes), None).mean(1, keepdim=True)
        return self.head(self.long(self.tokens(tokens), None) + note)


def _long_words(step: int) -> dict:
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 41, (1, 160), generator=draws)
    return {"input_ids": ids, "labels": ids, "kept": (torch.arange(160) < 130).long().unsqueeze(0),
            "at": torch.cat([torch.arange(40), torch.arange(120)]).unsqueeze(0)}  # fmt: skip


def _of_transformers(names: dict[str, str], **more) -> Task:
    import architectures

    task = architectures.language("MistralForCausalLM", "MistralConfig", **architectures.GROUPED, **more)
    return task.with_(batch=_long_words, inputs=lambda batch: ((), {to: batch[of] for to, of in names.items()}))


def a_window() -> Task:
    return _of_transformers({"input_ids": "input_ids"}, sliding_window=20)


def padded_words() -> Task:
    return _of_transformers({"input_ids": "input_ids", "attention_mask": "kept"}, sliding_window=None)


def packed_words() -> Task:
    return _of_transformers({"input_ids": "input_ids", "position_ids": "at"}, sliding_window=30)


def two_lengths() -> Task:
    """A batch with two lengths, which its task names."""

    def batch(step: int) -> dict:
        draws = torch.Generator().manual_seed(step)
        return {"tokens": torch.randint(VOCABULARY, (4, LENGTH + 1), generator=draws),
                "notes": torch.randint(VOCABULARY, (4, 5), generator=draws)}  # fmt: skip

    return Task(model=TwoLengths, batch=batch, inputs=lambda batch: ((batch["tokens"], batch["notes"]), {}), loss=_next,
                sequence={"tokens": 1, "notes": 1},
                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))  # fmt: skip


def notes_alone() -> Task:
    return two_lengths().with_(sequence={"notes": 1})


def _mean_of_next(logits: torch.Tensor, batch: dict) -> tuple:
    target = batch["tokens"].roll(-1, 1).masked_fill(batch["tokens"] == 3, -100)
    count = (target != -100).sum()
    mean = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1), weight=None)
    return mean * count, count


class WideHead(Decoder):
    """With more words than the width."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 40)


def averaged() -> Task:
    """A mean over the positions that count, times their number."""
    return replace(decoder(), model=WideHead, loss=_mean_of_next)


class LowRank(Block):
    """A block whose last product widens its rows, as that of a low-rank adapter does."""

    def __init__(self) -> None:
        super().__init__(16, 4, 4, False, True)
        self.narrow, self.wide = nn.Linear(16, 3), nn.Linear(3, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = super().forward(x, mask)
        return x + self.wide(self.narrow(x).tanh())


class LowRankBlocks(WideHead):
    """Two of them before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LowRank(), LowRank()])


def low_rank() -> Task:
    return replace(averaged(), model=LowRankBlocks)


class Freezing(PositionWise):
    """One layer is trained no more, which its forward says each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[0].requires_grad_(False)
        return self.layers(x)


def freezing() -> Task:
    return position_wise().with_(model=Freezing)
