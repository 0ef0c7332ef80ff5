"""Training scripts whose losses or weights on ranks are silently not those of one process: a table of kinds.

Every kind is an ordinary script with one thing in it that is right in one process and wrong where ranks hold parts of a
batch (or pieces of weights). `script(name, plan)` writes it out: self-contained, in float32 as people write it, and the
same text for one process, where `prepare` changes nothing, and for ranks. Most kinds have a right version,
`script(name, plan, right=True)`, which is equal on ranks and differs in a few of these places:

    seed, data, top, model, optimizer, before    prepared = model, optimizer, loader = shardwise.prepare(..., plan=PLAN)
    setup                                        losses = []
    for epoch in range(2):
        loop                                     for x, y in loader:
            begin, body, step, after             optimizer.zero_grad(); loss = prepared.backward(...); optimizer.step()
            losses.append(float(loss))
        epoch

A kind in TABLE is `== name: cause data [right=...] [plans=...]`, a body and sections, `-- place code` (on one line or
below) and, of the right version, `-- right place code` and `-- swap this => that`. A body that is left out is that of
LOSSES; one that goes backward nowhere ends in `loss = prepared.backward(loss)`. What this does not do: run anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from textwrap import indent

CAUSES = {
    "mean_over": "each rank's loss is a mean over a number out of proportion to its samples (tokens, class weights)",
    "loss_scope": "the loss does not add up over samples: it is made of several at once, or of where they stand",
    "model_mixes": "what the model gives for a sample hangs on the others of its batch, beside torch's batch norm",
    "batch_dim": "a batch is cut along a dim that does not count its samples",
    "sum_not_divided": "a sum is taken for a mean, so that all gradients are off by the number of ranks",
    "weight_of_mean": "a mean is given with a weight, and is divided by it once more",
    "divided_twice": "the micro-batches of a step are divided by their number in the script and in the plan",
    "counted_by_each_rank": "a term that belongs to no samples is added to a sum by every rank",
    "kept": "a tensor or a number that is kept from step to step is made of a rank's own samples",
    "draws": "random numbers are not those that one process draws for the same samples",
    "other_samples": "ranks read other samples than one process does",
    "batch_norm_buffers": "only statistics in buffers differ, which are of a rank's own samples",
    "optimizer_state": "what the optimizer keeps differs, which is seen from the second step on",
    "share_missing": "a gradient is of one rank's samples alone: the others' share is missing",
    "uneven_only": "it differs only where ranks have unequal numbers of samples, or one sample",
    "learning_rate": "the optimizer's settings differ, by a number of a rank's own or by the number of ranks",
    "clip": "gradients are clipped by the norm of a rank's own part",
    "weights_differ_between_ranks": "a rank writes weights or gradients by itself, and ranks come apart",
    "pieces": "a rank's piece of a weight, or a hook of its optimizer, is taken for the whole one",
    "hook": "a hook shapes the gradient of a rank's own samples, before ranks are summed",
    "own_backward": "loss.backward() stands beside or instead of prepared.backward",
    "evaluation": "a number that is reported or decided by is of a rank's own held-out samples",
    "order": "ranks make calls or steps in another order, or another number of them",
    "not_deterministic": "the script differs from run to run, in one process too",
}

DP = ("dp_replicate=2", "dp_shard=2,zero=2", "dp_shard=2,zero=3")
PLANS = {
    "dp": DP,
    "every": (*DP, "tp=2"),
    "pieces": DP[1:],
    "whole": DP[:2],
    "zero2": DP[1:2],
    "zero3": DP[2:],
    "sharded": (*DP[1:], "tp=2"),
    "gathered": (*DP[2:], "tp=2"),
    "tp": ("tp=2",),
}
SCOPES = {"loss_scope": "global", "model_mixes": "model"}  # what makes every kind of these causes right

# what a kind's `data` and `model` name; anything else is code
DATA = {
    "values": """
x = torch.randn(27, 6)
loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=8, shuffle=True)
""",
    "classes": """
x = torch.randn(27, 6)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
""",
    "indexed": """
x = torch.randn(27, 6)
loader = DataLoader(TensorDataset(x, x[:, :2].sin(), torch.arange(27)), batch_size=8, shuffle=True)
""",
    "masks": """
x = torch.randn(27, 2, 5, 5)
loader = DataLoader(TensorDataset(x, (x.sum(1, keepdim=True) > 0.5).to(x.dtype)), batch_size=8, shuffle=True)
""",
    "words": """
x = torch.randint(0, 11, (27, 7))
y = x.roll(-1, 1).masked_fill(torch.arange(7) >= torch.randint(2, 8, (27, 1)), -100)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
""",
}
MODELS = {
    "values": "model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))",
    "classes": "model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))",
    "indexed": "model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))",
    "masks": "model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))",
    "words": "model = nn.Sequential(nn.Embedding(11, 12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 11))",
    "noisy": "model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))",
    "normed": "model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))",
}
LOOPS = {"indexed": "for x, y, i in loader:"}
LOSSES = {
    "values": "loss = F.mse_loss(model(x), y)",
    "indexed": "loss = F.mse_loss(model(x), y)",
    "classes": "loss = F.cross_entropy(model(x), y)",
}
HEAD = """
import copy
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import shardwise
"""


FORWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
"""


@dataclass(frozen=True)
class Kind:
    """A script that is wrong on ranks: code for each of its places."""

    name: str
    cause: str  # which of CAUSES a proof should name
    plans: tuple[str, ...] = DP  # under which it differs from one process, by reasoning
    right: dict[str, str] = field(default_factory=dict)  # other code for some places, in the version that is equal
    swaps: tuple[tuple[str, str], ...] = ()  # and what it has for some text
    note: str = ""
    data: str = "values"
    top: str = ""
    model: str = ""
    forward: str = ""  # of a model with a body and a head, in place of `model`
    optimizer: str = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)"
    seed: str = "torch.manual_seed(0)\nnp.random.seed(0)\nrandom.seed(0)"
    before: str = ""
    setup: str = ""
    loop: str = "for x, y in loader:"
    begin: str = "optimizer.zero_grad()"
    body: str = ""
    step: str = "optimizer.step()"
    after: str = ""
    epoch: str = ""
    options: str = ""  # further arguments of prepare
    more: str = ""  # of the plan


def script(name: str, plan: str, *, right: bool = False) -> str:
    """The text of a kind's script; `right`: of its right version."""
    kind = KINDS[name]
    kind = replace(kind, **kind.right) if right else kind  # type: ignore[arg-type]
    own = "backward(" in kind.body or "p.grad = " in kind.body
    body = kind.body if own else kind.body + "\nloss = prepared.backward(loss)"
    model = MODELS.get(kind.model, kind.model)
    if kind.forward:
        model = FORWARD + indent(kind.forward, " " * 8) + "\n\nmodel = Net()"
    call = f"prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan=PLAN{kind.options})"
    whole = [HEAD, f'PLAN = "{plan}{kind.more}"', kind.seed, DATA.get(kind.data, kind.data), kind.top, model]
    whole += [kind.optimizer, kind.before, call, kind.setup, "losses = []", "for epoch in range(2):"]
    inner = [kind.begin, body, kind.step, kind.after, "losses.append(float(loss))"]
    parts = [*((0, part) for part in whole), (4, kind.loop), *((8, part) for part in inner), (4, kind.epoch)]
    text = "".join(indent(code.strip("\n"), " " * depth) + "\n" for depth, code in parts if code.strip())
    for old, new in kind.swaps if right else ():
        assert old in text, (name, old)
        text = text.replace(old, new)
    return text


def parsed(table: str) -> dict[str, Kind]:
    """The kinds of a table."""
    kinds = {}
    lines = "\n".join(line for line in table.split("\n") if not line.startswith("# "))
    for entry in lines.strip("\n").removeprefix("== ").split("\n== "):
        head, *rest = entry.split("\n", 1)
        name, cause, data, *words = head.replace(":", "").split()
        told = dict(word.split("=") for word in words)
        body, *sections = ("\n" + "".join(rest)).split("\n-- ")
        places, right, swaps = {"data": data, "model": data, "loop": LOOPS.get(data, Kind.loop)}, {}, []
        places["body"] = body.strip("\n") or LOSSES[data]
        for section in sections:
            if section.startswith("swap "):
                old, _, new = section.removeprefix("swap ").strip("\n").partition(" =>")
                swaps.append((old, new.strip()))
                continue
            of_right, section = section.startswith("right "), section.removeprefix("right ")
            place = section.split()[0]
            (right if of_right else places)[place] = section[len(place) :].removeprefix(" ").strip("\n")
        scope = told.get("right", SCOPES.get(cause))
        if scope and not right and not swaps:
            right = {"options": f', loss_scope="{scope}"'}
        kinds[name] = Kind(name, cause, PLANS[told.get("plans", "dp")], right, tuple(swaps), **places)
    return kinds


TABLE = """
== samples_for_tokens: mean_over words
loss = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100)
loss = prepared.backward(loss, mean_over=len(x))
-- swap mean_over=len(x) => mean_over=(y != -100).sum()
== unequal_tokens: mean_over words
loss = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100)
-- swap backward(loss) => backward(loss, mean_over=(y != -100).sum())
== ignored_labels: mean_over classes
y = torch.where(y == 2, -100, y)
loss = F.cross_entropy(model(x), y)
loss = prepared.backward(loss * len(y), len(y))
-- swap backward(loss * len(y), len(y)) => backward(loss, mean_over=(y != -100).sum())
== class_weights: mean_over classes
loss = criterion(model(x), y)
loss = prepared.backward(loss, mean_over=len(y))
-- setup criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.5]))
-- swap mean_over=len(y) => mean_over=criterion.weight[y].sum()
== masked_mean: mean_over values
kept = x[:, 0] > -1
loss = (model(x) - y)[kept].square().sum() / kept.sum().clamp(min=1)
loss = prepared.backward(loss, mean_over=len(x))
-- swap mean_over=len(x) => mean_over=kept.sum()
== two_means: mean_over values right=global
out, kept = model(x), y > 0
loss = F.mse_loss(out, y) + (out - y)[kept].abs().sum() / kept.sum().clamp(min=1)
loss = prepared.backward(loss, mean_over=len(x))
-- note a detector's boxes, beside all of its scores
== weights_normalised: mean_over values
w = x[:, 0].exp()
loss = (w * (model(x) - y).square().mean(1)).sum() / w.sum()
-- swap backward(loss) => backward(loss, mean_over=w.sum())
== focal_normaliser: mean_over classes
t = F.one_hot(y, 3).to(x.dtype)
ce = F.binary_cross_entropy_with_logits(model(x), t, reduction="none")
loss = ((1 - torch.exp(-ce)) ** 2 * ce).sum() / (y > 0).sum().clamp(min=1)
-- swap backward(loss) => backward(loss, mean_over=(y > 0).sum())
== model_returns_its_mean: mean_over words
loss = prepared.backward(model(x, y))
-- model
class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(11, 12), nn.Linear(12, 12), nn.Linear(12, 11)
    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.body(self.words(ids))))
        return F.cross_entropy(logits.transpose(1, 2), labels)
model = Language()
-- swap backward(model(x, y)) => backward(model(x, y), mean_over=(y != -100).sum())
== own_longest: mean_over words right=global
longest = int((y != -100).sum(1).max())
out = model(x[:, :longest])
loss = F.cross_entropy(out.transpose(1, 2), y[:, :longest].clamp(min=0))
-- note padding is trimmed to the longest of a batch, and counts
== gradient_of_inputs: mean_over values
moved = x.clone().requires_grad_()
(g,) = torch.autograd.grad(F.mse_loss(model(moved), y), moved)
loss = F.mse_loss(model(x + 3 * g), y)
-- note equal today: the gradient is scaled by the share of the mean
-- swap F.mse_loss(model(moved), y) => (model(moved) - y).square().sum()
-- swap 3 * g => 0.2 * g
== constant_for_samples: sum_not_divided values right=global
loss = (model(x) - y).square().sum() / 16
-- note equal where the constant is told from a mean, as today
== batch_size_for_samples: sum_not_divided classes
loss = F.cross_entropy(model(x), y, reduction="sum") / loader.batch_size
-- swap loader.batch_size => len(y)
-- note equal where the constant is told from a mean, as today
== sum_without_weight: sum_not_divided values
loss = F.mse_loss(model(x), y, reduction="sum")
-- note equal where a sum is told from a mean by its graph, as today
-- swap backward(loss) => backward(loss, y.numel())
== mean_times_samples: sum_not_divided values
loss = F.mse_loss(model(x), y) * len(x)
-- swap  * len(x) =>
== constant_mean_over: uneven_only values
loss = F.mse_loss(model(x), y)
loss = prepared.backward(loss, mean_over=8)
-- swap mean_over=8 => mean_over=len(x)
-- data
x = torch.randn(27, 6)
loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=9, shuffle=True)
-- model values
== mean_with_weight: weight_of_mean classes
loss = F.cross_entropy(model(x), y)
loss = prepared.backward(loss, len(y))
-- swap backward(loss, len(y)) => backward(loss * len(y), len(y))
== divided_twice: divided_twice classes plans=every
loss = F.cross_entropy(model(x), y) / 2
loss = prepared.backward(loss * len(y), len(y))
-- loop for number, (x, y) in enumerate(loader):
-- begin
-- step
if number % 2 == 1:
    optimizer.step()
    optimizer.zero_grad()
-- more ,accumulate=2
-- swap backward(loss * len(y), len(y)) => backward(loss)
== micro_batches_of_tokens: mean_over words
loss = F.cross_entropy(model(x).transpose(1, 2), y) / 2
-- loop for number, (x, y) in enumerate(loader):
-- begin
-- step
if number % 2 == 1:
    optimizer.step()
    optimizer.zero_grad()
-- more ,accumulate=2
-- swap backward(loss) => backward(loss, mean_over=(y != -100).sum())
== tokens_of_a_window: mean_over words right=global
n, loss = sum((y != -100).sum() for _, y in window), 0.0
for x, y in window:
    part = F.cross_entropy(model(x).transpose(1, 2), y, reduction="sum") / n
    loss += float(prepared.backward(part))
-- loop
batches = list(loader)
for window in (batches[:2], batches[2:]):
== penalty_beside_a_sum: counted_by_each_rank values
loss = F.mse_loss(model(x), y, reduction="sum") + 0.1 * sum(p.square().sum() for p in model.parameters())
loss = prepared.backward(loss, len(x))
-- swap , reduction="sum" =>
-- swap backward(loss, len(x)) => backward(loss)
== prior_beside_a_sum: counted_by_each_rank values right=global
mean, spread = model(x).chunk(2, 1)
kl = sum(0.5 * p.square().sum() for p in model.parameters()) / len(loader)
loss = (0.5 * ((mean - y[:, :1]) / spread.exp()).square() + spread).sum() + kl
-- note the evidence bound of a Bayesian network
# --- losses that do not add up over samples
== dice: loss_scope masks
p = model(x).sigmoid()
loss = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
== soft_f1: loss_scope classes
p, t = model(x).softmax(1), F.one_hot(y, 3).to(x.dtype)
tp, fp, fn = (p * t).sum(0), (p * (1 - t)).sum(0), ((1 - p) * t).sum(0)
loss = 1 - (2 * tp / (2 * tp + fp + fn + 1e-6)).mean()
== root_of_mean: loss_scope values
loss = F.mse_loss(model(x), y).sqrt()
== correlation: loss_scope values
out = model(x)
a, b = out - out.mean(0), y - y.mean(0)
loss = 1 - ((a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0) + 1e-6)).mean()
-- optimizer optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
== contrastive: loss_scope classes
a, b = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1)
loss = F.cross_entropy(a @ b.T / 0.5, torch.arange(len(x)))
== supervised_contrastive: loss_scope classes
z = F.normalize(model(x), dim=1)
same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
logp = (z @ z.T / 0.5).log_softmax(1)
loss = -((logp * same).sum(1) / same.sum(1).clamp(min=1)).mean()
== hardest_triplets: loss_scope classes
far = torch.cdist(model(x), model(x).detach())
same = y[:, None] == y
positive, negative = (far * same).amax(1), far.masked_fill(same, 9.0).amin(1)
loss = F.relu(positive - negative + 0.5).mean()
== cross_correlation: loss_scope classes
a, b = model(x), model(x + 0.1 * x.flip(1))
a, b = (a - a.mean(0)) / (a.std(0, unbiased=False) + 0.1), (b - b.mean(0)) / (b.std(0, unbiased=False) + 0.1)
loss = (a.T @ b / len(x) - torch.eye(3)).square().sum()
-- note Barlow twins
-- optimizer optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
== entropy_of_the_mean: loss_scope classes
p = model(x).softmax(1)
mean = p.mean(0)
loss = -(p * p.log()).sum(1).mean() + (mean * mean.log()).sum()
== balanced_codes: loss_scope classes
out = model(x)
with torch.no_grad():
    q = (out / 0.5).exp()
    for _ in range(3):
        q = q / q.sum(0)
        q = q / q.sum(1, keepdim=True)
loss = -(q * model(x + 0.1).log_softmax(1)).sum(1).mean()
-- note the assignments of SwAV
== load_balance: loss_scope classes
gates = model(x).softmax(1)
chosen = F.one_hot(gates.argmax(1), 3).to(x.dtype)
loss = F.nll_loss(gates.log(), y) + 3 * (chosen.mean(0) * gates.mean(0)).sum()
== discrepancy_of_halves: loss_scope classes
z = model(x)
a, b = z[x[:, 0] > 0], z[x[:, 0] <= 0]
loss = F.cross_entropy(z, y)
if len(a) and len(b):
    loss = loss + (a.mean(0) - b.mean(0)).square().sum()
-- note adaptation to another domain
== risk_sets: loss_scope values
risk, order = model(x)[:, 0], y[:, 0].argsort(descending=True)
loss = -(risk[order] - risk[order].logcumsumexp(0)).mean()
-- note the partial likelihood of survival
-- optimizer optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
== pairs_of_samples: loss_scope values
score = model(x)[:, 0]
apart, better = score[:, None] - score, y[:, :1] > y[:, 0]
loss = F.softplus(-apart)[better].mean()
-- optimizer optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
== broadcast_of_rows: loss_scope values
loss = (model(x)[:, :1] - y[:, 0]).square().mean()
-- note (n, 1) beside (n,)
-- swap model(x)[:, :1] => model(x)[:, 0]
== hardest_half: loss_scope classes
each = F.cross_entropy(model(x), y, reduction="none")
loss = each.topk(max(1, len(each) // 2)).values.mean()
== largest_four: loss_scope classes
each = F.cross_entropy(model(x), y, reduction="none")
loss = each.sort(descending=True).values[:4].mean()
== below_the_mean: loss_scope values
each = (model(x) - y).square().mean(1)
loss = torch.where(each <= each.mean().detach(), each, torch.zeros_like(each)).mean()
-- note trimmed losses
== softmax_over_the_batch: loss_scope values
each = (model(x) - y).square().mean(1)
loss = (each.detach().softmax(0) * each).sum()
== normalised_advantages: loss_scope classes
reward = x[:, 1] + x[:, 2]
advantage = (reward - reward.mean()) / (reward.std(unbiased=False) + 1e-6)
loss = (F.cross_entropy(model(x), y, reduction="none") * advantage).mean()
== frequencies_of_the_batch: loss_scope classes
count = torch.bincount(y, minlength=3).clamp(min=1)
loss = F.cross_entropy(model(x), y, weight=(len(y) / count).to(x.dtype), reduction="none").mean()
== smoothed_by_the_batch: loss_scope classes
t = F.one_hot(y, 3).to(x.dtype)
t = 0.9 * t + 0.1 * t.mean(0)
loss = -(t * model(x).log_softmax(1)).sum(1).mean()
== means_of_classes: loss_scope classes
each = F.cross_entropy(model(x), y, reduction="none")
loss = torch.stack([each[y == c].mean() for c in y.unique()]).mean()
== terms_of_one_size: loss_scope values
out = model(x)
a, b = F.mse_loss(out, y), out.abs().mean()
loss = a / a.detach() + b / b.detach()
-- note each term is divided by its own value
== weighed_by_a_number_read: loss_scope classes
out = model(x)
right = (out.argmax(1) == y).to(x.dtype).mean().item()
loss = F.cross_entropy(out, y) * (1.5 - right)
== a_branch_by_the_batch: loss_scope values
loss = F.mse_loss(model(x), y)
if y.mean() > 0:
    loss = 3 * loss
== first_eight: loss_scope values
loss = F.mse_loss(model(x)[:4], y[:4])
== last_sample: loss_scope values
out = model(x)
loss = F.mse_loss(out, y) + 0.5 * (out[-1] - y[-1]).square().mean()
== running_sum: loss_scope values
each = (model(x) - y).square().mean(1)
loss = each.cumsum(0).mean()
== weights_by_place: loss_scope values
each = (model(x) - y).square().mean(1)
loss = (torch.linspace(0.5, 1.5, len(x)) * each).mean()
== neighbours_are_alike: loss_scope values
out = model(x)
loss = F.mse_loss(out, y) + (out[1:] - out[:-1]).square().mean()
loss = prepared.backward(loss, mean_over=len(x))
== pairs_within_a_part: uneven_only values
pairs = model(x)[: len(x) // 2 * 2].unflatten(0, (-1, 2))
loss = prepared.backward((pairs - pairs.roll(1, 1)).square().sum(), len(pairs))
-- data
x = torch.randn(30, 6)
loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=8, shuffle=True)
-- model values
-- swap shuffle=True => shuffle=True, drop_last=True
== batch_size_as_a_shape: loss_scope values
rows = model(x).reshape(4, -1)
loss = -rows.log_softmax(1).diagonal().mean()
-- data
x = torch.randn(24, 6)
loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=8, shuffle=True)
-- model values
== episodes: loss_scope values
z = model(x)
known = z[:2]
loss = F.cross_entropy(-torch.cdist(z[2:], known), torch.arange(len(z) - 2) % 2)
-- data
x = torch.randn(24, 6)
loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=8, shuffle=True)
-- model values
== samples_in_a_temperature: loss_scope classes
t = len(x) / 2
loss = F.kl_div((model(x) / t).log_softmax(1), (x[:, :3] / t).softmax(1), reduction="batchmean") * t * t
== inputs_normalised: loss_scope values
x = (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3)
loss = F.mse_loss(model(x), y)
== mixup: loss_scope classes
lam, other = float(torch.rand(())), torch.randperm(len(x))
out = model(lam * x + (1 - lam) * x[other])
loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[other])
== cutmix: loss_scope masks
other = torch.randperm(len(x))
x, y = x.clone(), y.clone()
x[:, :, 1:4, 1:4], y[:, :, 1:4, 1:4] = x[other, :, 1:4, 1:4], y[other, :, 1:4, 1:4]
loss = F.binary_cross_entropy_with_logits(model(x), y)
# --- models that mix samples, batches cut along another dim, shapes of one sample
== model_takes_the_mean_off: model_mixes values
loss = prepared.backward(F.mse_loss(model(x), y))
-- forward
h = torch.tanh(self.body(x))
return self.head(h - h.mean(0))
== ghost_batch_norm: model_mixes values
loss = prepared.backward(F.mse_loss(model(x), y))
-- data
x = torch.randn(28, 6)
loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=8, shuffle=True)
-- model
class Ghost(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)
    def forward(self, x):
        groups = torch.tanh(self.body(x)).split(4)
        return self.head(torch.cat([self.norm(group) for group in groups]))
model = Ghost()
== attention_over_the_batch: model_mixes values
loss = prepared.backward(F.mse_loss(model(x), y))
-- model
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mix, self.head = nn.Linear(6, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 2)
    def forward(self, x):
        h = self.body(x)
        return self.head(h + self.mix(h[:, None], h[:, None], h[:, None], need_weights=False)[0][:, 0])
model = Rows()
-- note (samples, features) taken for (time, samples, features)
== begun_from_the_first_batch: model_mixes values plans=whole
loss = prepared.backward(F.mse_loss(model(x), y))
-- model
class ActNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.begun = False
    def forward(self, x):
        if not self.begun:
            self.begun = True
            self.scale.data.copy_(1 / (x.std(0) + 1e-3))
            self.shift.data.copy_(-x.mean(0))
        return (x + self.shift) * self.scale
model = nn.Sequential(nn.Linear(6, 8), ActNorm(8), nn.Tanh(), nn.Linear(8, 2))
== rows_kept_short: weights_differ_between_ranks values right=model
loss = prepared.backward(F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100))
-- data
x = torch.randint(0, 11, (27, 7))
loader = DataLoader(TensorDataset(x, x.roll(-1, 1)), batch_size=8, shuffle=True)
-- model model = nn.Sequential(nn.Embedding(11, 12, max_norm=1.0), nn.Linear(12, 12), nn.Linear(12, 11))
-- note an embedding's forward shortens the rows that it looks up
== time_for_samples: batch_dim values
out = model(x)
loss = F.cross_entropy(out.flatten(0, 1), y.flatten())
-- data
text = torch.randint(0, 11, (25, 6))  # (time, samples)
loader = [(text[i : i + 8], text[i + 1 : i + 9]) for i in (0, 8, 16)]
-- model
class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(11, 8), nn.GRU(8, 8), nn.Linear(8, 11)
    def forward(self, x):
        return self.head(self.rnn(self.words(x))[0])
model = Language()
-- right options , batch_dim=1
== squeezed_rows: uneven_only values
loss = F.cross_entropy(model(x), y)
-- data
x = torch.randn(27, 2, 5, 5)
loader = DataLoader(TensorDataset(x, x[:, 0, 0, :3].argmax(1)), batch_size=8, shuffle=True)
-- model
class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 3)
    def forward(self, x):
        return self.head(F.adaptive_avg_pool2d(self.body(x).relu(), 1).squeeze())
model = Pooled()
-- note fails on a rank with one sample; equal today, since two are dealt to each rank
-- swap .squeeze() => .flatten(1)
# --- what is kept from step to step
== queue_of_keys: kept classes
q, k = F.normalize(model(x), dim=1), F.normalize(x[:, 3:], dim=1)
logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.5
loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
-- setup queue = F.normalize(torch.randn(16, 3), dim=1)
-- after queue = torch.cat([queue, k])[-16:]
-- swap [queue, k] => [queue, prepared.gather(k)]
== running_mean_of_rewards: kept values
loss = ((model(x) - y).square().sum(1) * (y[:, 0] - mean)).mean()
-- setup mean = 0.0
-- after mean = 0.9 * mean + 0.1 * y[:, 0].mean().item()
-- right after
total, n = prepared.sum(y[:, 0].sum(), len(y))
mean = 0.9 * mean + 0.1 * float(total) / float(n)
== centers_of_classes: kept classes right=global
out = model(x)
loss = F.cross_entropy(out, y) + 0.1 * (out - centers[y]).square().mean()
-- setup centers = torch.zeros(3, 3)
-- after
for c in y.unique():
    centers[c] += 0.5 * (out[y == c].detach().mean(0) - centers[c])
== center_of_a_teacher: kept classes
with torch.no_grad():
    given = teacher(x)
loss = -((given - center).softmax(1) * model(x).log_softmax(1)).sum(1).mean()
-- setup teacher, center = nn.Linear(6, 3), torch.zeros(3)
-- after center = 0.9 * center + 0.1 * given.mean(0)
-- right after
total, n = prepared.sum(given.sum(0), len(given))
center = 0.9 * center + 0.1 * total / n
== memory_bank: kept indexed
out = model(x)
loss = F.mse_loss(out, y) + 0.1 * (out[:, None] - bank).square().mean()
-- setup bank = torch.zeros(27, 2)
-- after bank[i] = out.detach()
-- swap bank[i] = out.detach() => bank[prepared.gather(i)] = prepared.gather(out)
== replayed_samples: kept values right=global
loss = F.mse_loss(model(x), y)
if memory:
    old, aim = memory[0]
    loss = loss + F.mse_loss(model(old), aim)
-- setup memory = []
-- after memory.append((x, y))
== weighed_by_its_running_mean: kept values
loss = F.mse_loss(model(x), y) * (1 + mean)
own = loss.item()
loss = prepared.backward(loss)
-- setup mean = 0.0
-- after mean = 0.9 * mean + 0.1 * own
-- swap 0.1 * own => 0.1 * float(loss)
== inputs_by_a_running_mean: kept values
loss = F.mse_loss(model(x - mean), y)
-- setup mean = torch.zeros(6)
-- after mean = 0.9 * mean + 0.1 * x.mean(0)
-- right after
total, n = prepared.sum(x.sum(0), len(x))
mean = 0.9 * mean + 0.1 * total / n
== price_of_a_constraint: kept values
out = model(x)
loss = F.mse_loss(out, y) + price * (out.square().mean() - 0.1)
-- setup price = 1.0
-- after price = max(0.0, price + 0.5 * (out.square().mean().item() - 0.1))
-- right after
total, n = prepared.sum(out.detach().square().mean(1).sum(), len(x))
price = max(0.0, price + 0.5 * (float(total) / float(n) - 0.1))
== kept_by_the_forward: kept values right=model
-- model
class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.center = nn.Linear(6, 8), nn.Linear(8, 2), 0.0
    def forward(self, x):
        h = torch.tanh(self.body(x))
        h, self.center = h - self.center, 0.9 * self.center + 0.1 * h.detach().mean(0)
        return self.head(h)
model = Centered()
== code_book: kept values right=model
out, pull = model(x)
loss = F.mse_loss(out, y) + pull.mean()
-- model
class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 2), nn.Linear(2, 2)
        self.register_buffer("codes", torch.randn(4, 2))
    def forward(self, x):
        z = self.enter(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        found = self.codes[nearest]
        if self.training:
            for c in nearest.unique():
                self.codes[c].lerp_(z[nearest == c].detach().mean(0), 0.1)
        return self.leave(z + (found - z).detach()), (z - found).square().mean(1)
model = Codes()
== observed_range: kept values right=model
-- model
class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("most", torch.tensor(0.5))
    def forward(self, x):
        h = self.body(x)
        if self.training:
            self.most.lerp_(h.detach().abs().max(), 0.1)
        step = self.most / 16
        return self.head(h + ((h / step).round().clamp(-16, 16) * step - h).detach())
model = Rounded()
== forwards_are_counted: kept values plans=tp
-- top SEEN = [0]
-- forward
SEEN[0] += 1
return self.head(torch.tanh(self.body(x)) * (1 + 1 / SEEN[0]))
-- right begin
optimizer.zero_grad()
SEEN[0] = SEEN[0] + 1
-- swap SEEN[0] += 1 => pass
-- note prepare's own forwards count too, where it looks at the model
# --- random numbers
== noise_by_numpy: draws values
noise = torch.from_numpy(np.random.randn(*x.shape)).to(x.dtype)
loss = F.mse_loss(model(x + 0.1 * noise), y)
-- swap torch.from_numpy(np.random.randn(*x.shape)).to(x.dtype) => torch.randn_like(x)
== permutation_by_numpy: draws classes right=global
other = torch.from_numpy(np.random.permutation(len(x)))
loss = F.cross_entropy(model(0.7 * x + 0.3 * x[other]), y)
== scales_by_python: draws values
scale = torch.tensor([random.uniform(0.5, 1.5) for _ in x]).to(x.dtype)
loss = F.mse_loss(model(scale[:, None] * x), y)
-- swap torch.tensor([random.uniform(0.5, 1.5) for _ in x]).to(x.dtype) => 0.5 + torch.rand(len(x))
== flipped_one_by_one: draws masks
flips = [random.random() < 0.5 for _ in x]
x = torch.stack([row.flip(-1) if flip else row for row, flip in zip(x, flips)])
y = torch.stack([row.flip(-1) if flip else row for row, flip in zip(y, flips)])
loss = F.binary_cross_entropy_with_logits(model(x), y)
-- swap [random.random() < 0.5 for _ in x] => torch.rand(len(x)) < 0.5
-- note not detected before: NumPy's and Python's numbers decide by branches
== mirrored_times: draws classes right=global
half = torch.rand(len(x) // 2 + 1)
t = torch.cat([half, 1 - half])[: len(x)]
loss = F.cross_entropy(model(t[:, None] * x), y)
== noise_of_two_views: draws values
noise = 0.1 * torch.randn_like(torch.cat([x, x]))
a, b = model(torch.cat([x, x]) + noise).chunk(2)
loss = F.mse_loss(a, y) + F.mse_loss(b, y)
-- swap torch.randn_like(torch.cat([x, x])) => torch.cat([torch.randn_like(x), torch.randn_like(x)])
== several_for_each: draws values right=global
drawn = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), 2 * len(x), replacement=True).view(len(x), 2).to(x.dtype)
loss = F.mse_loss(model(x) * drawn, y)
== noise_by_its_own_generator: draws values right=global
noise = torch.randn(x.shape, generator=g)
loss = F.mse_loss(model(x + 0.1 * noise), y)
-- setup g = torch.Generator().manual_seed(1)
== counts_of_photons: draws values right=global
loss = F.mse_loss(model(torch.poisson(4 * x.abs()) / 4), y)
== times_by_beta: draws values
t = torch.distributions.Beta(2.0, 2.0).sample((len(x), 1)).to(x.dtype)
loss = F.mse_loss(model(t * x), y)
-- swap torch.distributions.Beta(2.0, 2.0).sample((len(x), 1)).to(x.dtype) => torch.rand(len(x), 1)
== negatives_drawn_in_the_batch: draws classes right=global
other = torch.randint(len(x), (len(x),))
z = model(x)
loss = F.cross_entropy(z, y) - 0.1 * (z - z[other].detach()).square().mean()
== a_draw_by_the_batch: draws values right=global
if y.mean() > 0:
    x = x + 0.1 * torch.randn(6)
loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
== seeded_by_rank: draws classes plans=every
-- model noisy
-- begin
torch.manual_seed(100 * len(losses) + prepared.rank)
optimizer.zero_grad()
-- swap  + prepared.rank =>
== dropout_of_each_rank: draws classes
-- model noisy
-- options , randomness="fast"
-- swap , randomness="fast" =>
== crops_read_in_parts: draws values
-- data
class Crops(Dataset):
    def __init__(self):
        self.x = torch.randn(27, 9)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        at = int(torch.randint(0, 4, ()))
        return self.x[i, at : at + 6], self.x[i, :2].sin()
loader = DataLoader(Crops(), batch_size=8, shuffle=True)
-- options , reads="part"
-- swap , reads="part" =>
== workers_that_draw: draws values plans=every
-- data
class Noisy(Dataset):
    def __init__(self):
        self.x = torch.randn(27, 6)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(6), self.x[i, :2].sin()
loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
-- swap , num_workers=1, persistent_workers=True =>
-- note persistent workers go on drawing where another epoch would begin anew
== seed_of_the_clock: not_deterministic classes plans=every
-- model noisy
-- seed torch.manual_seed(int(time.time() * 1e6) % 2**31)
-- swap int(time.time() * 1e6) % 2**31 => 0
# --- other samples
== split_without_a_seed: other_samples values plans=every
-- seed torch.seed()
-- data
x = torch.randn(35, 6, generator=torch.Generator().manual_seed(1))
data, held = torch.utils.data.random_split(TensorDataset(x, x[:, :2].sin()), [27, 8])
torch.manual_seed(0)
loader = DataLoader(data, batch_size=8, shuffle=True)
-- swap [27, 8]) => [27, 8], torch.Generator().manual_seed(0))
== distributed_sampler: other_samples values plans=every
-- data
x = torch.randn(27, 6)
data, world = TensorDataset(x, x[:, :2].sin()), int(os.environ.get("WORLD_SIZE", 1))
sampler = torch.utils.data.DistributedSampler(data, world, int(os.environ.get("RANK", 0)))
loader = DataLoader(data, batch_size=8, sampler=sampler)
-- swap sampler=sampler => shuffle=True
== dealt_by_the_dataset: other_samples values plans=every
-- data
class Rows(IterableDataset):
    def __init__(self):
        self.x, self.rank = torch.randn(27, 6), int(os.environ.get("RANK", 0))
    def __iter__(self):
        for row in self.x[self.rank :: int(os.environ.get("WORLD_SIZE", 1))]:
            yield row, row[:2].sin()
loader = DataLoader(Rows(), batch_size=8)
-- swap [self.rank :: int(os.environ.get("WORLD_SIZE", 1))] =>
== order_of_each_rank: other_samples values plans=every
-- data
x = torch.randn(27, 6)
g = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=8, shuffle=True, generator=g)
-- swap int(os.environ.get("RANK", 0)) => 0
== sampled_by_their_losses: other_samples indexed
each = (model(x) - y).square().mean(1)
loss = each.mean()
-- data
x, often = torch.randn(27, 6), torch.ones(27, dtype=torch.double)
sampler = torch.utils.data.WeightedRandomSampler(often, 27)
loader = DataLoader(TensorDataset(x, x[:, :2].sin(), torch.arange(27)), batch_size=8, sampler=sampler)
-- after often[i] = each.detach().double()
-- swap often[i] = each.detach().double() => often[prepared.gather(i)] = prepared.gather(each).double()
# --- statistics in buffers
== teacher_in_training_mode: batch_norm_buffers classes
with torch.no_grad():
    aim = teacher(x)
loss = F.mse_loss(model(x), aim)
-- setup teacher = nn.Sequential(nn.Linear(6, 3, bias=False), nn.BatchNorm1d(3))
-- note equal today: its batch norm counts all samples
-- swap nn.BatchNorm1d(3)) => nn.BatchNorm1d(3)).eval()
== statistics_of_an_average: batch_norm_buffers classes
-- model normed
-- setup average = torch.optim.swa_utils.AveragedModel(model)
-- epoch
average.update_parameters(model)
torch.optim.swa_utils.update_bn(loader, average)
losses.append(float(average.module[1].running_var.sum()))
-- note equal today: update_bn's forwards count all samples
-- swap AveragedModel(model) => AveragedModel(model, use_buffers=True)
-- swap torch.optim.swa_utils.update_bn(loader, average) => average.eval()
== statistics_of_instances: batch_norm_buffers values right=model
-- data
x = torch.randn(27, 3, 6)
loader = DataLoader(TensorDataset(x, x[:, 0, :2].sin()), batch_size=8, shuffle=True)
-- model model = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten(), nn.Linear(18, 2))
# --- what the optimizer keeps, and is set to
== momentum_by_own_samples: optimizer_state values
-- after
keep = 0.5 + 0.1 * y.mean()
for p in model.parameters():
    optimizer.state[p]["exp_avg"].mul_(keep)
-- swap y.mean() => float(prepared.sum(y.mean(1).sum())[0]) / float(prepared.sum(len(y))[0])
== momentum_forgotten_on_one_rank: optimizer_state values plans=every
-- epoch
if prepared.rank == 0:
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].zero_()
-- swap if prepared.rank == 0: => if True:
== plateau_of_own_loss: learning_rate values
loss = F.mse_loss(model(x), y)
own = loss.item()
loss = prepared.backward(loss)
-- setup schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
-- after schedule.step(own)
-- swap schedule.step(own) => schedule.step(float(loss))
== rate_by_samples_seen: learning_rate values
-- setup seen = 0
-- after
seen += len(x)
optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seen / 20)
-- swap seen += len(x) => seen += float(prepared.sum(len(x))[0])
== rate_by_tokens_seen: learning_rate words
n = (y != -100).sum()
loss = F.cross_entropy(model(x).transpose(1, 2), y)
loss = prepared.backward(loss, mean_over=n)
-- setup tokens = 0
-- after
tokens += int(n)
optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, tokens / 100)
-- swap tokens += int(n) => tokens += int(prepared.sum(n)[0])
== rate_by_ranks: learning_rate values plans=every
-- optimizer optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * int(os.environ.get("WORLD_SIZE", 1)))
-- swap  * int(os.environ.get("WORLD_SIZE", 1)) =>
# --- weights and gradients that a rank writes by itself
== written_on_one_rank: weights_differ_between_ranks values plans=every
-- after
if prepared.rank == 0:
    with torch.no_grad():
        model[0].weight.mul_(0.9)
-- swap if prepared.rank == 0: => if True:
== weights_by_own_samples: weights_differ_between_ranks values
-- after
with torch.no_grad():
    model[2].bias.lerp_(y.mean(0), 0.1)
-- swap y.mean(0) => prepared.sum(y.sum(0))[0] / prepared.sum(len(y))[0]
== gradients_by_own_samples: weights_differ_between_ranks values
-- step
for p in model.parameters():
    p.grad = p.grad + 0.1 * y.mean()
optimizer.step()
-- swap y.mean() => float(prepared.sum(y.mean(1).sum())[0]) / float(prepared.sum(len(y))[0])
# --- gradients of a rank's own samples
== plain_backward: own_backward classes
loss = F.cross_entropy(model(x), y)
loss.backward()
-- swap loss.backward() => loss = prepared.backward(loss)
== backward_of_a_scaled_loss: own_backward classes
loss = F.cross_entropy(model(x), y)
scaler.scale(loss).backward()
-- setup scaler = torch.amp.GradScaler("cpu", enabled=False)
-- step
scaler.step(optimizer)
scaler.update()
-- swap scaler.scale(loss).backward() => loss = prepared.backward(scaler.scale(loss))
== second_loss_by_itself: own_backward values
out = model(x)
F.l1_loss(out, y).backward(retain_graph=True)
loss = prepared.backward(F.mse_loss(out, y))
-- swap F.l1_loss(out, y).backward(retain_graph=True) => prepared.backward(F.l1_loss(out, y), retain_graph=True)
== optimizer_beside: own_backward values
beside.zero_grad()
F.mse_loss(model(x), y).backward()
beside.step()
optimizer.zero_grad()
loss = prepared.backward(F.mse_loss(model(x), y))
-- optimizer
optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
beside = torch.optim.SGD(model[2].parameters(), lr=0.1)
-- swap F.mse_loss(model(x), y).backward() => prepared.backward(F.mse_loss(model(x), y))
== squares_of_gradients: own_backward values
loss = F.mse_loss(model(x), y)
held = sum((f * (p - q).square()).sum() for f, p, q in zip(fisher, model.parameters(), before))
loss = prepared.backward(loss + held, mean_over=len(x))
-- setup
fisher = [torch.zeros(p.shape) for p in model.parameters()]
before = [p.detach().clone() for p in model.parameters()]
-- epoch
for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    for f, p in zip(fisher, model.parameters()):
        f += p.grad.square()
-- note a penalty by the importance of weights, as for a second task
-- swap F.mse_loss(model(x), y).backward() => prepared.backward(F.mse_loss(model(x), y), mean_over=len(x))
== trained_centers: share_missing classes
out = model(x)
loss = F.cross_entropy(out, y) + (out - centers[y]).square().mean()
-- optimizer
centers = nn.Parameter(torch.ones(3, 3))
of_centers = torch.optim.SGD([centers], lr=0.5)
optimizer = torch.optim.AdamW([*model.parameters()], lr=1e-2)
-- after
of_centers.step()
of_centers.zero_grad()
-- right after
-- swap [*model.parameters()] => [*model.parameters(), centers]
-- swap prepare(model, => prepare((model, nn.ParameterList([centers])),
-- swap prepared = model, => prepared = (model, (centers,)),
== head_with_its_own_plan: share_missing values
loss = F.mse_loss(head(model(x)), y)
loss = prepared.backward(loss)
-- setup
head = nn.Linear(2, 2)
of_head = head, heads, loader = shardwise.prepare(head, torch.optim.SGD(head.parameters(), lr=0.1), loader, plan=PLAN)
-- begin
optimizer.zero_grad()
heads.zero_grad()
-- step
optimizer.step()
heads.step()
-- swap backward(loss) => backward(loss, also=[of_head])
== projected_gradients: share_missing values right=model plans=every
out = model(x)
a, b = F.mse_loss(out[:, 0], y[:, 0]), F.mse_loss(out[:, 1], y[:, 1])
of_a = torch.autograd.grad(a, [*model.parameters()], retain_graph=True)
of_b = torch.autograd.grad(b, [*model.parameters()])
dot, norm = sum((g * h).sum() for g, h in zip(of_a, of_b)), sum(h.square().sum() for h in of_b)
for p, g, h in zip(model.parameters(), of_a, of_b):
    p.grad = g + h - min(0.0, float(dot / norm)) * h
loss = a + b
-- note refused under tp, the right version too
== penalty_on_gradients_of_weights: share_missing values right=model plans=every
loss = F.mse_loss(model(x), y)
gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
loss = loss + 0.1 * sum(g.square().sum() for g in gradients)
-- note refused under tp, the right version too
== tasks_by_norms_of_gradients: share_missing values right=model plans=every
out = model(x)
a, b = F.mse_loss(out, y), out.abs().mean()
of_a, of_b = (torch.autograd.grad(one, model[0].weight, retain_graph=True)[0].norm() for one in (a, b))
loss = a + of_a / (of_b + 1e-3) * b
-- note refused under tp, the right version too
== samples_clipped_one_by_one: share_missing values right=model plans=every
total = [torch.zeros(p.shape) for p in model.parameters()]
for row, aim in zip(x.split(1), y.split(1)):
    loss = F.mse_loss(model(row), aim)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    norm = sum(g.square().sum() for g in gradients).sqrt()
    for t, g in zip(total, gradients):
        t += g * min(1.0, 0.5 / float(norm)) / len(x)
for p, t in zip(model.parameters(), total):
    p.grad = t
-- note refused under tp, the right version too
== inner_steps: share_missing values right=model plans=every
names = dict(model.named_parameters())
gradients = torch.autograd.grad(F.mse_loss(model(x), y), [*names.values()], create_graph=True)
fast = {name: p - 0.1 * g for (name, p), g in zip(names.items(), gradients)}
h = torch.tanh(F.linear(x, fast["0.weight"], fast["0.bias"]))
loss = F.mse_loss(F.linear(h, fast["2.weight"], fast["2.bias"]), y)
-- note refused under tp, the right version too
# --- hooks, clipping, pieces
== weight_scaled_by_the_forward: pieces values plans=zero3
-- options , check_loss=False
-- forward
self.body.weight.data.mul_(0.9)
return self.head(torch.tanh(self.body(x)))
-- right forward
return self.head(torch.tanh(0.9 * self.body(x)))
== hook_that_clamps: hook values
-- before model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
-- right before
-- right step
model[0].weight.grad.clamp_(-0.01, 0.01)
optimizer.step()
== hook_behind_prepare: hook values plans=every
-- setup model[0].weight.register_hook(lambda g: g / (g.norm() + 1e-3))
-- right setup
-- right step
model[0].weight.grad.div_(model[0].weight.grad.norm() + 1e-3)
optimizer.step()
== hook_behind_accumulation: hook values
-- before
def clamp(p):
    p.grad.clamp_(-0.01, 0.01)

for p in model.parameters():
    p.register_post_accumulate_grad_hook(clamp)
-- right before
-- right step
for p in model.parameters():
    p.grad.clamp_(-0.01, 0.01)
optimizer.step()
== hook_on_a_hidden_state: hook values plans=every
loss = prepared.backward((model(x) - y).square().sum(), y.numel())
-- forward
h = torch.tanh(self.body(x))
if h.requires_grad:
    h.register_hook(lambda g: g.clamp(-0.005, 0.005))
return self.head(h)
-- right options , loss_scope="model"
-- swap sum(), y.numel()) => mean())
-- note a sum is divided behind its backward, so the hook sees larger gradients; under tp too
== backward_of_unit_norm: hook values right=model
-- top
class Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-6)
-- forward
return self.head(Unit.apply(torch.tanh(self.body(x))))
== clip_by_own_gradients: clip values plans=every
loss = F.mse_loss(model(x), y)
gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
norm = sum(g.square().sum() for g in gradients).sqrt()
loss = prepared.backward(loss * min(1.0, 0.2 / float(norm)))
-- right body loss = prepared.backward(F.mse_loss(model(x), y))
-- right step
prepared.clip_grad_norm_(0.2)
optimizer.step()
== clip_in_a_hook_of_the_optimizer: clip values plans=sharded
-- before
def clip(optimizer, *_):
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_((0.1 / (p.grad.norm() + 1e-6)).clamp(max=1))
optimizer.register_step_pre_hook(clip)
-- right before
-- right step
for p in model.parameters():
    p.grad.mul_((0.1 / (p.grad.norm() + 1e-6)).clamp(max=1))
optimizer.step()
== average_in_a_hook: pieces values plans=sharded
-- before
average = copy.deepcopy(model).requires_grad_(False)
def follow(*_):
    for a, p in zip(average.parameters(), model.parameters()):
        a.lerp_(p.detach(), 0.1)
optimizer.register_step_post_hook(follow)
-- right before average = copy.deepcopy(model).requires_grad_(False)
-- right after
for a, p in zip(average.parameters(), model.parameters()):
    a.lerp_(p.detach(), 0.1)
== written_in_a_hook: pieces values plans=sharded
-- before
@torch.no_grad()
def shorten(*_):
    model[0].weight.mul_((0.5 / model[0].weight.norm(dim=1, keepdim=True)).clamp(max=1))
optimizer.register_step_post_hook(shorten)
-- right before
-- right after
with torch.no_grad():
    model[0].weight.mul_((0.5 / model[0].weight.norm(dim=1, keepdim=True)).clamp(max=1))
== average_of_what_the_optimizer_has: pieces values plans=pieces
-- before average = [p.detach().clone() for p in model.parameters()]
-- after
for a, p in zip(average, optimizer.param_groups[0]["params"]):
    a.mul_(0.9).add_(0.1 * p.detach())
-- epoch losses.append(float(sum(a.abs().sum() for a in average)))
-- swap optimizer.param_groups[0]["params"] => model.parameters()
== marks_on_weights: pieces values plans=pieces
-- optimizer
class Marked(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * getattr(p, "lr_scale", 1.0))
model[0].weight.lr_scale = 0.1
optimizer = Marked(model.parameters(), lr=0.1)
-- right optimizer
groups = [{"params": [p], "lr": 0.01 if p is model[0].weight else 0.1} for p in model.parameters()]
optimizer = torch.optim.SGD(groups, lr=0.1)
== another_parameter_in_the_forward: pieces values plans=every
-- model
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(6, 2), nn.Parameter(torch.ones(2))
    def forward(self, x):
        self.scale = nn.Parameter(0.9 * self.scale.detach())
        return self.body(x) * self.scale
model = Scaled()
-- swap self.scale = nn.Parameter(0.9 * self.scale.detach()) => pass
== weights_in_a_list_of_its_own: pieces values plans=pieces
-- optimizer
class Listed(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.mine = [p for group in self.param_groups for p in group["params"]]
    @torch.no_grad()
    def step(self):
        for p in self.mine:
            p.add_(p.grad, alpha=-0.1)
optimizer = Listed(model.parameters(), lr=0.1)
-- swap in self.mine: => in self.param_groups[0]["params"]:
# --- what is decided by a rank's own numbers, and by one rank
== counted_right: evaluation classes
out = model(x)
right += (out.argmax(1) == y).sum().item()
loss = F.cross_entropy(out, y)
-- setup right = 0
-- epoch losses.append(right / 27)
-- swap (out.argmax(1) == y).sum().item() => float(prepared.sum((out.argmax(1) == y).sum())[0])
== rate_by_own_held_out_samples: evaluation values
-- setup
x = torch.randn(11, 6)
held = prepared.split(DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=4))
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
-- epoch
with torch.no_grad():
    error = sum(F.mse_loss(model(x), y).item() for x, y in held) / len(held)
losses.append(error)
schedule.step(error)
-- right epoch
total = count = 0.0
for x, y in held:
    with torch.no_grad():
        some, n = prepared.sum(F.mse_loss(model(x), y, reduction="sum"), y.numel())
    total, count = total + float(some), count + float(n)
losses.append(total / count)
schedule.step(total / count)
== evaluated_on_one_rank: order values plans=every
-- setup some = torch.randn(4, 6)
-- epoch
if prepared.rank == 0:
    with torch.no_grad():
        losses.append(float(model(some).sum()))
-- swap if prepared.rank == 0: => if True:
== saved_on_one_rank: order values plans=gathered
-- epoch
if prepared.rank == 0:
    saved = {name: value.clone() for name, value in model.state_dict().items()}
-- swap if prepared.rank == 0: => if True:
== loaded_on_one_rank: order values
-- before saved = {name: 0.5 * value for name, value in model.state_dict().items()}
-- setup
if prepared.rank == 0:
    model.load_state_dict(saved)
-- swap if prepared.rank == 0: => if True:
== stopped_by_own_loss: order values
loss = F.mse_loss(model(x), y)
own = loss.item()
loss = prepared.backward(loss)
-- setup best = float("inf")
-- after
if own > 1.1 * best:
    break
best = min(best, own)
-- swap own > 1.1 => float(loss) > 1.1
-- swap (best, own) => (best, float(loss))
== skipped_by_own_loss: order values
loss = F.mse_loss(model(x), y)
if loss.item() > 0.45:
    continue
loss = prepared.backward(loss)
-- right body
loss = prepared.backward(F.mse_loss(model(x), y))
if float(loss) > 0.45:
    continue
== stopped_by_samples_seen: order values
-- setup seen = 0
-- after
seen += len(x)
if seen >= 20:
    break
-- swap seen += len(x) => seen += float(prepared.sum(len(x))[0])
# --- what is told by a proof alone, or late in a run
== draws_behind_the_first_batch: draws values
-- data
class Late(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x + random.random() if index > 15 else x), y
x = torch.randn(27, 6)
loader = DataLoader(Late(x, x[:, :2].sin()), batch_size=8)
-- model values
-- right options , reads="whole"
== augmented_from_the_second_epoch: draws values
-- data
class Mirrored(TensorDataset):
    draws = False
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (-x if self.draws and random.random() < 0.5 else x), y
x = torch.randn(27, 6)
loader = DataLoader(Mirrored(x, x[:, :2].sin()), batch_size=8)
-- model values
-- epoch Mirrored.draws = True
-- right options , reads="whole"
== output_as_long_as_the_longest: mean_over values
loss = model(x, lengths).square().mean()
-- data
x = torch.randn(27, 5, 6)
lengths = torch.randint(1, 6, (27,))
loader = DataLoader(TensorDataset(x, lengths), batch_size=3, shuffle=True)
-- loop for x, lengths in loader:
-- model
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.GRU(6, 3, batch_first=True)
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True, padding_value=1.0)
        return out
model = Recurrent()
-- swap batch_first=True, padding_value=1.0) => batch_first=True, padding_value=1.0, total_length=x.shape[1])
== penalty_before_the_first_forward: share_missing values plans=tp
penalty = sum(p.square().sum() for p in model.parameters())
loss = F.mse_loss(model(x), y) + 0.1 * penalty
-- right body
out = model(x)
penalty = sum(p.square().sum() for p in model.parameters())
loss = F.mse_loss(out, y) + 0.1 * penalty
== parameters_of_a_loss: share_missing classes plans=every
loss = criterion(model(x), y)
-- top
class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.ones(3, 3))
    def forward(self, out, y):
        return F.cross_entropy(out, y) + (out - self.centers[y]).square().mean()
criterion = Centers()
-- optimizer optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-2)
-- swap prepare(model, => prepare((model, criterion),
-- swap prepared = model, => prepared = (model, criterion),
== views_side_by_side: loss_scope values
out = model(x).unflatten(0, (-1, 2))
loss = (out.mean(1) - y).square().mean() + (out[:, 0] @ out[:, 1].T).logsumexp(1).mean()
-- options , loss_scope="global"
-- forward
both = torch.stack([x, 0.5 * x.flip(1)], 1).flatten(0, 1)
return self.head(torch.tanh(self.body(both)))
-- swap torch.stack([x, 0.5 * x.flip(1)], 1).flatten(0, 1) => torch.cat([x, 0.5 * x.flip(1)])
-- swap model(x).unflatten(0, (-1, 2)) => torch.stack(model(x).chunk(2), 1)
== head_made_anew: pieces values plans=every
-- epoch model[2] = nn.Linear(8, 2)
-- right epoch
with torch.no_grad(), prepared.whole():
    model[2].reset_parameters()
== thawed_after_prepare: optimizer_state values plans=every
-- optimizer
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
-- epoch model[0].requires_grad_(True)
-- right options , thaws=True
== group_added_later: optimizer_state values plans=every
-- optimizer
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
-- epoch
if epoch == 0:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
-- right options , thaws=True
-- right epoch
if epoch == 0:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
    shardwise.save(prepared, "run")
    optimizer.load_state_dict(optimizer.state_dict())
== inner_steps_by_functional_call: share_missing values right=model plans=every
names = dict(model.named_parameters())
gradients = torch.autograd.grad(F.mse_loss(model(x), y), [*names.values()], create_graph=True)
fast = {name: p - 0.1 * g for (name, p), g in zip(names.items(), gradients)}
loss = F.mse_loss(torch.func.functional_call(model, fast, (x,)), y)
-- note refused under tp and zero=3, the right version too
== norm_behind_its_own_backward: own_backward values plans=every
F.mse_loss(model(x), y).backward()
norm = float(sum(p.grad.square().sum() for p in model.parameters())) ** 0.5
optimizer.zero_grad()
loss = prepared.backward(F.mse_loss(model(x), y) / (1 + norm))
-- swap F.mse_loss(model(x), y).backward() => prepared.backward(F.mse_loss(model(x), y))
== norm_read_before_the_step: own_backward values plans=every
loss = F.mse_loss(model(x), y)
loss.backward()
norm = float(sum(p.grad.square().sum() for p in model.parameters())) ** 0.5
-- step
optimizer.param_groups[0]["lr"] = 1e-2 / (1 + norm)
optimizer.step()
-- swap loss.backward() => loss = prepared.backward(loss)
== outputs_differentiated_apart: loss_scope values
first, second, h = model(x)
g = torch.autograd.grad(first.sum(), h, create_graph=True, allow_unused=True)[0]
loss = F.mse_loss(second, y) + (0.0 if g is None else g.square().mean())
-- options , loss_scope="global"
-- model
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 2)
    def forward(self, x):
        h = self.body(x).tanh()
        return self.first(h).square(), self.second(h), h
model = Two()
-- swap , loss_scope="global" => , loss_scope="sample"
== own_mean_beside_outputs: loss_scope values
out, own = model(x)
loss = F.mse_loss(out, y) + own
-- options , loss_scope="global"
-- forward
h = torch.tanh(self.body(x))
return self.head(h), h.square().mean()
-- swap h.square().mean() => h.square().mean(1)
-- swap + own => + own.mean()
== rows_of_samples_given_whole: model_mixes values
owner = torch.arange(len(x)).repeat_interleave((x[:, 0] > 0).long() + 1)
loss = F.mse_loss(model(x, 0.5 * x[owner], owner), y)
-- options , loss_scope="global", check_loss=False
-- model
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
    def forward(self, x, rows, owner):
        sums = torch.zeros_like(x).index_add(0, owner % len(x), rows)
        return self.head(torch.tanh(self.body(x + sums)))
model = Net()
-- swap "global" => "model"
== optimizer_that_stops: pieces values plans=sharded
-- optimizer
class Late(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.mine, self.count = [p for group in self.param_groups for p in group["params"]], 0
    @torch.no_grad()
    def step(self):
        self.count += 1
        for p in self.mine if self.count > 3 else self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.1)
optimizer = Late(model.parameters(), lr=0.1)
-- swap self.mine if self.count > 3 else self.param_groups[0]["params"]: => self.param_groups[0]["params"]:
== another_parameter_later: pieces values plans=every
-- setup count = 0
-- after
count += 1
if count == 4:
    model[2].bias = nn.Parameter(torch.zeros(2))
-- right after
count += 1
if count == 4:
    with torch.no_grad(), prepared.whole():
        model[2].bias.zero_()
"""
KINDS = parsed(TABLE)
