"""A small GPT-2 and Hugging Face's Trainer, on lines of unequal length: torchrun --nproc-per-node 2 trainer_text.py

One process takes twice the batch: python trainer_text.py --batch-size 8.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()
set_seed(3)


class Lines(Dataset):
    """Rising numbers, of which the first ones are a prompt that is not trained on."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (index + torch.arange(16) * (1 + index % 3)) % 50
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(16) < index % 9, -100)}


sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
arguments = TrainingArguments(
    output_dir="trained",
    per_device_train_batch_size=args.batch_size,
    gradient_accumulation_steps=2,
    average_tokens_across_devices=True,
    max_steps=4,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    max_grad_norm=1.0,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=Lines()).train()
