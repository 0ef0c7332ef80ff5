import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
MASK, PAD = 3, 0
texts = [torch.randint(4, 40, (int(n),)).tolist() for n in torch.randint(5, 14, (40,))]


def collate(rows):
    width = max(len(r) for r in rows)
    ids = torch.tensor([r + [PAD] * (width - len(r)) for r in rows])
    mask = (ids != PAD).long()
    labels = ids.clone()
    chosen = torch.bernoulli(torch.full(labels.shape, 0.3)).bool() & mask.bool()
    chosen[:, 0] = True
    labels[~chosen] = -100
    ids = ids.masked_fill(chosen, MASK)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


config = BertConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
)
model = BertForMaskedLM(config)
decay = [p for n, p in model.named_parameters() if p.dim() > 1]
rest = [p for n, p in model.named_parameters() if p.dim() <= 1]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=5e-3, eps=1e-4)
loader = DataLoader(texts, batch_size=8, shuffle=True, collate_fn=collate)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, 10)
losses = []
model.train()
for epoch in range(2):
    for batch in loader:
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
