"""Fine-tuning a Hugging Face model from a local checkpoint folder, beside the same model from random weights.

There is no download: the folder is made here, from a small Llama that learned sums as text ("7+8=15"). It is then
taught another form, a question and an answer of which only the answer is learnt.

    python examples/finetune.py --plan tp=2
"""

import json
import os
from pathlib import Path

import draw
import torch

from shardwise import hf, train
from shardwise.data import JsonlSource

FOLDER = Path(os.environ.get("FINETUNE_FOLDER", "runs/finetune"))


def config():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=64, **sizes)


def optimizer(groups):
    return torch.optim.AdamW(groups, lr=3e-3)


def write_data():
    """Sums of two numbers below 30; every fifth is held out of both trainings."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    sums = [(a, b) for a in range(30) for b in range(30)]
    kinds = {"sums": lambda a, b: {"text": f"{a}+{b}={a + b}\n"},
             "questions": lambda a, b: {"prompt": f"What is {a} and {b}? ", "completion": f"{a + b}\n"}}  # fmt: skip
    for kind, make in kinds.items():
        for part, held in (("", False), ("-held-out", True)):
            chosen = [make(a, b) for a, b in sums if ((7 * a + b) % 5 == 0) == held]
            (FOLDER / f"{kind}{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in chosen))


def made(source, kind):
    data, held_out = (JsonlSource(FOLDER / f"{kind}{part}.jsonl", seq_len=64, end=0) for part in ("", "-held-out"))
    return hf.task(source, "causal-lm", data=data, eval_data=held_out, optimizer=optimizer)


def base():
    return made(config(), "sums")


def task():
    return made(FOLDER / "checkpoint", "questions")


def scratch():
    return made(config(), "questions")


def make_checkpoint(steps, plan="single"):
    """A folder with config.json and model.safetensors, as `from_pretrained` reads it."""
    write_data()
    if not (FOLDER / "checkpoint").exists():
        run = train(f"{__file__}:base", plan, steps=steps, batch_samples=16, out=str(FOLDER))
        hf.export(run.folder / "model.safetensors", FOLDER / "checkpoint", config())


def main(arguments=None):
    given = draw.asked(__doc__, 60, arguments)
    make_checkpoint(2 * given.steps, given.plan)
    curves = {}
    for name, start in (("from the checkpoint", "task"), ("from random weights", "scratch")):
        more = {"batch_samples": 16, "eval_every": max(given.steps // 6, 1), "eval_samples": 32, "out": str(given.out)}
        run = train(f"{__file__}:{start}", given.plan, steps=given.steps, **more)
        print(f"{name}\n{run}")
        curves[name] = draw.losses(run.metrics, "eval_loss")
        if start == "task":
            hf.export(run.folder / "model.safetensors", run.folder / "folder", FOLDER / "checkpoint")
    draw.save(draw.lines(curves, f"Held-out answers, plan {given.plan}", "nats"), given.out / "finetune.svg")


if __name__ == "__main__":
    main()
