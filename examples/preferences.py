"""Direct preference optimisation (DPO): of two answers the model learns to prefer one, against a frozen copy of itself.

    loss = -log sigmoid(beta * ((log p(chosen) - log p(rejected)) - the same of the frozen copy))

Pairs are made here: sums with the right answer, and the same with a wrong one.

    python examples/preferences.py --plan dp_shard=2,zero=3
"""

import copy
from functools import partial

import draw
import torch
import torch.nn.functional as F

from shardwise import Task, train

BETA, LENGTH, IGNORED = 0.5, 24, -100


class Pairs:
    """Samples of {"chosen", "rejected", "chosen_labels", "rejected_labels"}: int64 (B, LENGTH) each, as bytes."""

    def __init__(self, held_out):
        self.sums = [(a, b) for a in range(30) for b in range(30) if ((7 * a + b) % 5 == 0) == held_out]

    def __len__(self):
        return len(self.sums)

    def read(self, indices, region=None):
        rows = [pair(*self.sums[index]) for index in indices]
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def pair(a, b):
    prompt, sample = f"{a}+{b}=", {}
    for kind, answer in (("chosen", a + b), ("rejected", a + b + 1 + (a * b) % 7)):
        text = f"{prompt}{answer}\n".encode()
        sample[kind] = [*text, *[0] * (LENGTH - len(text))]
        learned, rest = text[len(prompt) :], [IGNORED] * (LENGTH - len(text))
        sample[f"{kind}_labels"] = [IGNORED] * len(prompt) + [*learned] + rest
    return sample


class Preference(torch.nn.Module):
    """How much more likely each answer is to the model than to its frozen copy: two of (B,), in nats."""

    def __init__(self, policy):
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(False)

    def forward(self, chosen, rejected, chosen_labels, rejected_labels):
        pairs = ((chosen, chosen_labels), (rejected, rejected_labels))
        return tuple(likelihood(self.policy, *pair) - likelihood(self.reference, *pair) for pair in pairs)


def likelihood(model, ids, labels):
    """Log probability of each sample's learned tokens, (B,)."""
    logits, targets = model(input_ids=ids).logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return -losses.sum(1)


def loss(margins, batch):
    chosen, rejected = margins
    return -F.logsigmoid(BETA * (chosen - rejected)).sum(), len(batch["chosen"])


def prefers(margins, batch):
    """The share of samples whose chosen answer has become more likely than the rejected one."""
    return {"preferred": ((margins[0] > margins[1]).sum(), len(batch["chosen"]))}


def model():
    """Any model with logits; of a folder: hf.task(folder, model=Preference, ...)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Preference(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)))


def task():
    adam = partial(torch.optim.AdamW, lr=1e-3)
    return Task(model=model, loss=loss, data=Pairs(False), eval_data=Pairs(True), optimizer=adam,
                metrics=prefers, inputs=lambda batch: ((), batch))  # fmt: skip


def main(arguments=None):
    given = draw.asked(__doc__, 60, arguments)
    more = {"batch_samples": 16, "eval_every": max(given.steps // 6, 1), "eval_samples": 32, "out": str(given.out)}
    print(run := train(f"{__file__}:task", given.plan, steps=given.steps, **more))
    curves = {"held out": draw.losses(run.metrics, "eval_loss"), "training": draw.losses(run.metrics, "loss")}
    draw.save(draw.lines(curves, f"Preference of right sums, plan {given.plan}", "nats"), given.out / "preferences.svg")


if __name__ == "__main__":
    main()
