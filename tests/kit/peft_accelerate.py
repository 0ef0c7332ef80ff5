"""A fine-tuning on chats as it is written with peft and Accelerate: what a run of `[lora]` is compared with."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def encode(tokenizer, messages):
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False)
    last = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
    labels = [token if len(prompt) <= place < last else -100 for place, token in enumerate(ids)]
    return torch.tensor(ids), torch.tensor(labels)


def collate(pad, samples):
    ids, labels = zip(*samples, strict=True)
    ids = pad_sequence(ids, batch_first=True, padding_value=pad)
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != pad).long(), "labels": labels}


def main(folder: str, data: str, adapter: str, steps: int, lr: float) -> list[float]:
    accelerator = Accelerator(cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter, is_trainable=True)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=lr)
    samples = [encode(tokenizer, json.loads(line)["messages"]) for line in Path(data).read_text().splitlines()]
    loader = DataLoader(samples, len(samples), collate_fn=partial(collate, tokenizer.pad_token_id))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(steps):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses
