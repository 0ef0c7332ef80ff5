"""Mixtures over stacked weights that choose and deal in one forward, as people write them; each returns a `Task`."""

from __future__ import annotations

import math
from typing import Any

import joined_tasks
import torch
import torch.nn.functional as F
from listed_tasks import CHOICES, EXPERTS, Net, Words, of
from module_tasks import OUT, WIDTH, sequences, task
from torch import Tensor, nn

from shardwise import Task

INNER = 5


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-2]))


class Looped(nn.Module):
    """A loop over experts in the forward that routes; biases are stacked too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1, self.b1 = weights(EXPERTS, WIDTH, INNER), nn.Parameter(torch.randn(EXPERTS, INNER))
        self.w2, self.b2 = weights(EXPERTS, INNER, WIDTH), nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, chosen = self.gate(x).softmax(-1).topk(CHOICES, -1)
        return gates / gates.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        gates, chosen = self.route(rows)
        made = torch.zeros_like(rows)
        for expert in range(len(self.w1)):
            token, choice = torch.where(chosen == expert)
            if not len(token):
                continue
            inner = F.gelu(rows[token] @ self.w1[expert] + self.b1[expert])
            done = inner @ self.w2[expert] + self.b2[expert]
            made.index_add_(0, token, done * gates[token, choice, None])
        return made.view_as(x)


class Written(Looped):
    """Writes in place, transposed weights, results into the rows of a mask; a weight before the second product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = weights(EXPERTS, 2 * INNER, WIDTH), weights(EXPERTS, WIDTH, INNER)
        del self.w1, self.b1, self.w2, self.b2

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        made = torch.zeros_like(x)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            mine, choice = (chosen == number).nonzero(as_tuple=True)
            gate, value = F.linear(x[mine], up).chunk(2, dim=-1)
            value = value * F.silu(gate)
            value *= gates[mine, choice].unsqueeze(-1)
            made[mine] += F.linear(value, down)
        return made


class Dense(Looped):
    """Every expert computes every token, by one einsum over all; scores of those not chosen are 0."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        scores = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, gates)
        inner = torch.einsum("td,edh->teh", x, self.w1) + self.b1
        done = torch.einsum("teh,ehd->ted", F.silu(inner), self.w2) + self.b2
        return (scores.unsqueeze(-1) * done).sum(1)


class DenseInTurn(Looped):
    """Every expert computes every token, in turn."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        made = torch.zeros_like(x)
        for expert in range(EXPERTS):
            share = ((chosen == expert) * gates).sum(-1, keepdim=True)
            made = made + share * ((x @ self.w1[expert] + self.b1[expert]).relu() @ self.w2[expert])
        return made


class Slots(Looped):
    """Slots of each expert filled and emptied by einsums, products of all experts by `bmm`: as GShard."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        masks = F.one_hot(chosen, EXPERTS).to(x.dtype)
        dealt = torch.diag_embed(masks.sum(1).T)  # (E, T, T): each expert has a slot for each token
        rows = torch.einsum("ets,td->esd", dealt, x)
        inner = F.relu(torch.baddbmm(self.b1[:, None], rows, self.w1))
        done = torch.bmm(inner, self.w2) + self.b2.unsqueeze(1)
        return torch.einsum("ets,te,esd->td", dealt, (masks * gates[..., None]).sum(1), done)


class Held(nn.Module):
    """Experts in a module of their own, given the rows of each: (E, C, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = weights(EXPERTS, WIDTH, INNER), weights(EXPERTS, INNER, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.einsum("ecd,edh->ech", rows, self.w1).tanh() @ self.w2


class GivenSlots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Held()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = scores * (scores >= scores.topk(CHOICES, -1).values[:, -1:])
        dealt = torch.diag_embed((chosen > 0).to(x.dtype).T)
        return torch.einsum("ets,te,esd->td", dealt, chosen, self.experts(torch.einsum("ets,td->esd", dealt, x)))


class Grouped(nn.Module):
    """Experts in a module of their own, given sorted rows and how many are whose: as torchtitan's."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = weights(EXPERTS, WIDTH, INNER), weights(EXPERTS, INNER, WIDTH)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        pieces = rows.split(counts.tolist())
        return torch.cat([F.silu(piece @ self.w1[n]) @ self.w2[n] for n, piece in enumerate(pieces)])


class SortedRows(nn.Module):
    def __init__(self, experts: Any = Grouped) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), experts()

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.gate(x).sigmoid().topk(CHOICES, -1)
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=EXPERTS)
        done = self.experts(x[order // CHOICES], counts)
        return torch.zeros_like(x).index_add(0, order // CHOICES, done * gates.view(-1)[order, None])


class Picked(Looped):
    """Each token picks its weights by index: as the plain code of gpt-oss."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        inner = torch.einsum("tkdh,td->tkh", self.w1[chosen], x) + self.b1[chosen]
        done = torch.einsum("tkhd,tkh->tkd", self.w2[chosen, ...], inner.tanh()) + self.b2[chosen]
        return torch.einsum("tkd,tk->td", done, gates)


class PickedOne(Looped):
    """One expert to a token, its weights gathered by `index_select` for a product of each row."""

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.gate(x).softmax(-1).max(-1)
        inner = torch.bmm(x.unsqueeze(1), self.w1.index_select(0, chosen)).squeeze(1) + F.embedding(chosen, self.b1)
        return gate[:, None] * torch.bmm(F.silu(inner)[:, None], self.w2[chosen]).squeeze(1)


class PickedInSequences(Looped):
    """Weights by an index of three dims, broadcast products, dots in an einsum."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        inner = torch.einsum("...dh,...d->...h", self.w1[chosen], x.unsqueeze(2)) + self.b1[chosen]
        done = (F.gelu(inner).unsqueeze(-2) @ self.w2[chosen]).squeeze(-2)
        return (gates.unsqueeze(-1) * done).sum(2)


class SummedByEinsum(Looped):
    """The einsum of the last product sums over the experts as well."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        scores = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, chosen, gates)
        inner = (x.unsqueeze(0) @ self.w1 + self.b1[:, None]).sigmoid()
        return torch.einsum("eth,ehd,te->td", inner, self.w2, scores)


class Soft(nn.Module):
    """Slots that are mixtures of all positions of a sample, and no choice: as soft mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(WIDTH, EXPERTS, 2))
        self.w1, self.b1 = weights(EXPERTS, WIDTH, INNER), nn.Parameter(torch.randn(EXPERTS, INNER))
        self.w2 = weights(EXPERTS, INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("bmd,dnp->bmnp", x, self.slots)
        rows = torch.einsum("bmd,bmnp->bnpd", x, logits.softmax(1))
        inner = F.gelu(torch.einsum("bnpd,ndh->bnph", rows, self.w1) + self.b1[:, None])
        done = torch.einsum("bnph,nhd->bnpd", inner, self.w2)
        return torch.einsum("bnpd,bmnp->bmd", done, logits.flatten(2).softmax(-1).view_as(logits))


class SharedNorm(Looped):
    """Between its products an expert reads what all share: a norm and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(INNER), nn.Parameter(torch.rand(INNER) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        gates, chosen = self.route(rows)
        made = torch.zeros_like(rows)
        for expert in range(EXPERTS):
            token, choice = torch.where(chosen == expert)
            inner = self.norm(rows[token] @ self.w1[expert]) * self.scale
            made.index_add_(0, token, (inner @ self.w2[expert]) * gates[token, choice, None])
        return made.view_as(x)


class Casting(Looped):
    """Computes its experts in float32, whatever the rows are, in an autocast of its own that is off."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        made = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, choice = torch.where(chosen == expert)
            with torch.autocast(x.device.type, enabled=False):
                done = F.gelu(x[token].float() @ self.w1[expert].float()) @ self.w2[expert].float()
            made.index_add_(0, token, (done * gates[token, choice, None]).to(made.dtype))
        return made


class OwnAutocast(Looped):
    """Experts under an autocast of the mixture's own."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        made = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, choice = torch.where(chosen == expert)
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                done = x[token] @ self.w1[expert] @ self.w2[expert]
            made.index_add_(0, token, (done * gates[token, choice, None]).to(made.dtype))
        return made


class WithoutGradients(Looped):
    """Experts without gradients, a router with them."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        made = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, choice = torch.where(chosen == expert)
            with torch.no_grad():
                done = x[token] @ self.w1[expert] @ self.w2[expert]
            made.index_add_(0, token, done * gates[token, choice, None])
        return made


class ByKeyword(Looped):
    """Weights picked by functions that are called by keywords, and by indices that count from the end."""

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.gate(x).softmax(-1).max(-1)
        inner = torch.bmm(x.unsqueeze(1), torch.index_select(input=self.w1, dim=0, index=chosen)).squeeze(1)
        inner = F.silu(inner + F.embedding(input=chosen, weight=self.b1))
        return gate[:, None] * torch.bmm(inner[:, None], self.w2[chosen - EXPERTS]).squeeze(1)


class Raw(Looped):
    """The router is a bare weight (E, H), of as many rows as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = None
        self.scores = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, chosen = F.linear(x, self.scores).softmax(-1).topk(CHOICES, -1)
        return gates, chosen


class Noisy(Looped):
    """Noise in the router, dropout behind the mixture, counts in a buffer, a loss of its own left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS))
        self.load: Tensor

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        gates, chosen = (logits + 0.3 * torch.randn_like(logits)).softmax(-1).topk(CHOICES, -1)
        self.load += F.one_hot(chosen, EXPERTS).sum((0, 1))
        return gates, chosen

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class Whole(nn.Module):
    """A model that is one module: the weights of its experts are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, OUT)
        self.experts = weights(EXPERTS, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x).argmax(-1)
        made = x.clone()
        for number in best.unique().tolist():
            made[best == number] = torch.tanh(x[best == number] @ self.experts[number])
        return self.out(made * self.gate(x).sigmoid().amax(-1, keepdim=True))


class OneOfFour(Looped):
    """All rows go to the first expert: other ranks compute nothing, and their shares are used all the same."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates, chosen = super().route(x)
        return gates, chosen * 0


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class InTwoLoops(Looped):
    """First all first products, then all second ones: rows of the second hang on what the first gave."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        pairs = [torch.where(chosen == expert) for expert in range(EXPERTS)]
        inner = torch.cat([x[token] @ self.w1[expert] for expert, (token, _) in enumerate(pairs)]).relu()
        inner = inner.split([len(token) for token, _ in pairs])
        made = torch.zeros_like(x)
        for expert, (token, choice) in enumerate(pairs):
            made.index_add_(0, token, (inner[expert] @ self.w2[expert]) * gates[token, choice, None])
        return made


class Penalised(Looped):
    """Reads its stacked weights beside the experts too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.w1.square().mean()


class Dropping(Looped):
    """Dropout between an expert's products."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        made = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, choice = torch.where(chosen == expert)
            inner = F.dropout(x[token] @ self.w1[expert], 0.3, self.training)
            made.index_add_(0, token, (inner @ self.w2[expert]) * gates[token, choice, None])
        return made


class Heads(nn.Module):
    """Stacked weights that are no experts: one matrix to each head, and a choice elsewhere in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = weights(EXPERTS, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("td,hdk->thk", x, self.heads).tanh().mean(1)


class Channels(nn.Module):
    """A convolution, of as many channels as there are samples, beside a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        best = self.conv(x).amax(1)
        return self.out(best * (best > best.topk(2, -1).values[:, -1:]))


def channels() -> Task:
    return task(Channels, sequences)


def looped() -> Task:
    return of(Looped)


def written() -> Task:
    return of(Written, branches="same")


def dense() -> Task:
    return of(Dense, branches="same")


def dense_in_turn() -> Task:
    return of(DenseInTurn, branches="same")


def slots() -> Task:
    return of(Slots, branches="same")


def given_slots() -> Task:
    return of(GivenSlots, branches="same")


def sorted_rows() -> Task:
    return of(SortedRows)


def picked() -> Task:
    return of(Picked, branches="same")


def picked_in_sequences() -> Task:
    return task(lambda: nn.Sequential(Net(PickedInSequences), Mean()), sequences, branches="same")


def summed_by_einsum() -> Task:
    return of(SummedByEinsum, branches="same")


def soft() -> Task:
    return task(lambda: nn.Sequential(Net(Soft), Mean()), sequences, branches="same")


def shared_norm() -> Task:
    return of(SharedNorm, branches="same")


def shared_norm_words() -> Task:
    return joined_tasks.of_words(lambda: Words(SharedNorm))


def casting() -> Task:
    return of(Casting, branches="same")


def own_autocast() -> Task:
    return of(OwnAutocast)


def without_gradients() -> Task:
    return of(WithoutGradients)


def by_keyword() -> Task:
    return of(ByKeyword, branches="same")


def picked_one() -> Task:
    return of(PickedOne, branches="same")


def raw_router() -> Task:
    return of(Raw)


def one_of_four() -> Task:
    return of(OneOfFour, branches="same")


def noisy() -> Task:
    return of(Noisy)


def whole_model() -> Task:
    return task(Whole, branches="per_sample")


def words() -> Task:
    return joined_tasks.of_words(lambda: Words(Looped))


def words_picked() -> Task:
    class PickedWords(Picked):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(-1, WIDTH)).view_as(x)

    return joined_tasks.of_words(lambda: Words(PickedWords))


def in_two_loops() -> Task:
    return of(InTwoLoops)


def penalised() -> Task:
    return of(Penalised)


def dropping() -> Task:
    return of(Dropping)


def heads() -> Task:
    return task(lambda: nn.Sequential(Heads(), Net(Looped)), branches="per_sample")
