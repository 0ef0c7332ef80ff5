import torch
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Reverse(Dataset):
    def __init__(self, n=36):
        self.rows = [torch.randint(2, 30, (int(k),)) for k in torch.randint(3, 9, (n,))]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i].flip(0)}


def collate(batch):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([b["input_ids"] for b in batch], batch_first=True, padding_value=0)
    labels = pad([b["labels"] for b in batch], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


config = T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
loader = DataLoader(Reverse(), batch_size=4, shuffle=True, collate_fn=collate)
accumulation_steps = 2
losses = []
model.train()
optimizer.zero_grad()
for step, batch in enumerate(loader):
    loss = model(**batch).loss / accumulation_steps
    loss.backward()
    if (step + 1) % accumulation_steps == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
