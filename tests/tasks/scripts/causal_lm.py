"""Fine-tuning a transformers causal LM on lines of unequal length, padded, with the loss that the model returns."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

torch.manual_seed(2)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
)
model = LlamaForCausalLM(config).double()
lines = [torch.randint(1, 64, (length,)) for length in (5, 9, 7, 12, 4, 8, 11, 6, 10)]


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


loader = DataLoader(lines, batch_size=4, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
scheduler = get_linear_schedule_with_warmup(optimizer, 1, 6)

losses = []
for epoch in range(2):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())

generated = model.generate(lines[0][None, :3], max_new_tokens=4, do_sample=False)
