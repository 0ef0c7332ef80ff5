"""Tasks for pipelines, transformers' modules among them: each function takes nothing and returns a `Task`."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Task
from shardwise.models import tasks

WIDTH, OUT, VOCAB = 6, 3, tasks.VOCAB


def vectors(step: int, samples: int = 7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step + 100)
    return {"x": torch.randn(samples, WIDTH, generator=g), "y": torch.randn(samples, OUT, generator=g)}


def sequences(step: int, samples: int = 7, length: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step + 100)
    return {"x": torch.randn(samples, length, WIDTH, generator=g), "y": torch.randn(samples, OUT, generator=g)}


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch["y"]).square().sum(), len(batch["y"])


def x_only(batch: Any) -> tuple[tuple, dict]:
    return (batch["x"],), {}


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def task(model: Any, batch: Any = vectors, **changes: Any) -> Task:
    fields = {"loss": squares, "inputs": x_only, "optimizer": sgd}
    return Task(model=model, batch=batch, **{**fields, **changes})


class Routed(nn.Module):
    """Gives each sample to one of three experts, all of which are given theirs before any result is put back."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = [(x.argmax(1) % 3 == number).nonzero().flatten() for number in range(3)]
        outputs = [expert(x[own]) for expert, own in zip(self.experts, rows, strict=True)]
        y = torch.zeros_like(x)
        for own, output in zip(rows, outputs, strict=True):
            y[own] = output
        return x + y


class HeadByStep(nn.Module):
    """Two blocks and the one of three heads that the batch names, read before anything is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, OUT) for _ in range(3))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        head = self.heads[int(which[0])]
        for block in self.blocks:
            x = x + block(x).tanh()
        return head(x)


def head_by_step() -> Task:
    """Each step trains another head; stages are cut by the first one."""

    def batch(step: int) -> dict[str, Tensor]:
        return {**vectors(step), "which": torch.full((7,), step % 3)}

    return task(HeadByStep, batch, inputs=lambda b: ((b["x"], b["which"]), {}))


def routed() -> Task:
    """What is given to an expert, halfway through the work, has as many rows as values say."""
    return task(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed(), nn.Linear(WIDTH, OUT)))


# --- modules of torch alone


def sequential() -> Task:
    """A plain chain, with an activation that writes into what it is given right after each layer."""

    def model() -> nn.Module:
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
        return nn.Sequential(*layers, nn.Linear(WIDTH, OUT))

    return task(model)


def widths() -> Task:
    """A chain whose layers change the width."""
    sizes = [WIDTH, 11, 17, 13, 9, OUT]

    def model() -> nn.Module:
        return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(sizes)])

    return task(model)


class Encoder(nn.Module):
    """torch's own encoder over sequences."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def encoder() -> Task:
    return task(Encoder, sequences)


class Residual(nn.Module):
    """The caller adds: what a block is given is used again after it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def residual() -> Task:
    return task(Residual)


class Reused(nn.Module):
    """One layer that runs three times, on several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.between = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for between in self.between:
            x = torch.tanh(between(torch.tanh(self.layer(x))))
        return self.head(x)


def reused() -> Task:
    return task(Reused)


class ReusedBlock(nn.Module):
    """A block of two layers that runs three times (ALBERT): a stage begins inside its second run."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return torch.tanh(self.second(x))

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = self.Block(), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.block(self.block(x))))


def reused_block() -> Task:
    return task(ReusedBlock)


class Conditioned(nn.Module):
    """An embedding of the input that every block is given beside the hidden state; blocks return pairs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.gate = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, condition: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            return x + torch.tanh(self.layer(x)) * self.gate(condition) * scale, x

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Conditioned.Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, OUT)
        self.register_buffer("scale", torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        condition = F.silu(self.condition(x))
        x = self.enter(x)
        for block in self.blocks:
            x, _ = block(x, condition=condition, scale=self.scale)
        return self.head(x + condition)


def conditioned() -> Task:
    return task(Conditioned)


class Normed(nn.Module):
    """Batch norm in every block: statistics of each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)]
        )
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def normed() -> Task:
    return task(Normed, partial(vectors, samples=12))


class Skips(nn.Module):
    """Every layer's output is used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(5 * WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.layers[0](x)]
        for layer in self.layers:
            kept.append(torch.tanh(layer(kept[-1])))
        return self.head(torch.cat(kept, -1))


def skips() -> Task:
    return task(Skips)


class GivesTwice(nn.Module):
    """Gives its result and a list in which it is again, beside what it was given; made once, it keeps a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if self.mask is None:
            self.register_buffer("mask", torch.arange(WIDTH, device=x.device) % 3 > 0, persistent=False)
        y = torch.tanh(self.layer(x)) * self.mask
        return y, (x, y)


class SkipsGivenTwice(nn.Module):
    """A U-Net whose way down hands on each result together with the skips, among which it is."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([GivesTwice() for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        kept: tuple[Tensor, ...] = ()
        for block in self.down:
            x, more = block(x)
            kept += more
        for layer in self.up:
            x, kept = layer(x * kept[-1]), kept[:-1]
        return self.head(x)


def skips_given_twice() -> Task:
    return task(SkipsGivenTwice)


def two_layers() -> Task:
    return task(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)))


def no_parameters_late() -> Task:
    """The last places begin nothing that has parameters."""
    return task(lambda: nn.Sequential(nn.Linear(WIDTH, OUT), nn.Tanh(), nn.Tanh(), nn.Tanh()))


class Decides(nn.Module):
    """The outermost forward looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.abs().max() > 100:
                break
        return self.head(x)


def decides() -> Task:
    return task(Decides)


class ReadsAtPlaces(nn.Module):
    """Its own code reads hidden states at places that it computes of them, before the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, OUT))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh())
        place = (h[:, 0].sigmoid() * WIDTH).long().clamp(max=WIDTH - 1)
        return self.last(h + h[torch.arange(len(h)), place][:, None])


def reads_at_places() -> Task:
    return task(ReadsAtPlaces)


class DrawsAtRoot(nn.Module):
    """Noise drawn once, used by every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        for block in self.blocks:
            x = F.dropout(torch.tanh(block(x)) + 0.1 * noise, 0.1)
        return self.head(x)


def draws_at_root() -> Task:
    return task(DrawsAtRoot)


class WritesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-1, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def writes_parameter() -> Task:
    return task(WritesParameter)


# --- transformers


def _tokens(model: Any, samples: int = 6) -> Task:
    return Task(
        model=model, loss=tasks.next_token_loss, inputs=tasks.hf_tokens, optimizer=tasks.adamw,
        batch=partial(tasks.token_batch, samples=samples, length=10),
    )  # fmt: skip


def _plain_tokens(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    return (), {"input_ids": batch["tokens"]}


SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDE = {"intermediate_size": 48, "max_position_embeddings": 32}


def _causal(kind: str, **options: Any) -> Task:
    def model() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**SPECIAL, **options)
        return getattr(transformers, f"{kind}ForCausalLM" if kind != "GPT2" else "GPT2LMHeadModel")(config)

    return _tokens(model)


def hf_llama() -> Task:
    return _causal("Llama", **SIZES, **WIDE, num_key_value_heads=2)


def hf_mistral() -> Task:
    return _causal("Mistral", **SIZES, **WIDE, num_key_value_heads=2, sliding_window=4)


def hf_qwen3() -> Task:
    return _causal("Qwen3", **SIZES, **WIDE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)


def hf_gemma() -> Task:
    return _causal("Gemma", **SIZES, **WIDE, num_key_value_heads=2, head_dim=8)


def hf_gpt2() -> Task:
    return _causal("GPT2", vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=16)


def hf_neox() -> Task:
    return _causal("GPTNeoX", **SIZES, **WIDE)


def hf_opt() -> Task:
    return _causal("OPT", **SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=32)


def hf_phi() -> Task:
    return _causal("Phi", **SIZES, **WIDE)


def hf_mixtral() -> Task:
    # the grouped product that is its default has no float64
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    made = _causal("Mixtral", **SIZES, **WIDE, num_key_value_heads=2, **experts)
    return made.with_(branches="per_sample")


def hf_bert() -> Task:
    def model() -> nn.Module:
        import transformers

        config = transformers.BertConfig(**SIZES, **WIDE, pad_token_id=0)
        return transformers.BertForMaskedLM(config)

    return _tokens(model).with_(inputs=_plain_tokens)


def hf_vit() -> Task:
    def model() -> nn.Module:
        import transformers

        config = transformers.ViTConfig(
            image_size=tasks.IMAGE, patch_size=4, num_labels=tasks.CLASSES, hidden_size=24, intermediate_size=48,
            num_hidden_layers=4, num_attention_heads=2,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)

    return tasks.hf_vit().with_(model=model)


def _encoder_decoder(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    given = {"input_ids": batch["tokens"], "decoder_input_ids": batch["tokens"].flip(1), "use_cache": False}
    return (), given


def hf_t5() -> Task:
    def model() -> nn.Module:
        import transformers

        config = transformers.T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)

    return _tokens(model).with_(inputs=_encoder_decoder)


class Viewed(nn.Module):
    """Blocks are given a view of a larger tensor, and write nothing."""

    def __init__(self, base_later: bool) -> None:
        super().__init__()
        self.base_later = base_later
        self.enter = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        base = self.enter(x)
        part = base[:, :WIDTH]
        x = part + torch.tanh(self.blocks[0](part))
        x = x + torch.tanh(self.blocks[1](x))
        return self.head(x + base[:, WIDTH:] if self.base_later else x)


def viewed() -> Task:
    return task(lambda: Viewed(False))


def viewed_with_base() -> Task:
    return task(lambda: Viewed(True))


def few_samples() -> Task:
    """Five samples: dealt over micro-batches and data ranks, some ranks have none and run a stand-in."""
    return tasks.decoder_dropout().with_(batch=partial(tasks.token_batch, samples=5, length=10), name="few_samples")


class KeptToItself(nn.Module):
    """The caller computes a value from a parameter that no module is given, and uses it at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain.exp()
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x * gain)


def kept_to_itself() -> Task:
    return task(KeptToItself)


class ReadsEarly(nn.Module):
    """Weights of its own that it reads, and multiplies with, around the calls of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.up = nn.ParameterList([nn.Parameter(torch.randn(8, WIDTH) / 3) for _ in range(3)])
        self.down = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 8) / 3) for _ in range(3)])
        self.gain, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain
        for block, up, down in zip(self.blocks, self.up, self.down, strict=True):  # read before the block is entered
            x = torch.tanh(block(x))
            x = x + F.linear(torch.relu(F.linear(x, up)), down)
        return self.head((x * gain).mean(1))


def reads_early() -> Task:
    return task(ReadsEarly, sequences)


class OwnWeights(nn.Module):
    """Nothing but weights of its own: a stage begins where it calls a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, WIDTH) / 3)
        self.down = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 8) / 3) for _ in range(3)])
        self.read = nn.Parameter(torch.randn(OUT, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        start = x * self.read[0].tanh()
        for up, down in zip(self.up, self.down, strict=True):
            h = F.linear(x, up)
            h.relu_()
            x = x + F.linear(h, down)
        return (x + start) @ self.read.T


def own_weights() -> Task:
    return task(OwnWeights)


class Messages(nn.Module):
    """A graph network in one forward: places between its layers, of which each needs what the caller made of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.edges = nn.ModuleList([nn.Linear(2 * WIDTH + 1, WIDTH) for _ in range(2)])
        self.nodes = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        nodes = self.enter(x)[:, None] * torch.linspace(0.5, 1.5, 3, dtype=x.dtype)[:, None]
        for edge, node in zip(self.edges, self.nodes, strict=True):
            to, of = nodes[:, :, None].expand(-1, 3, 3, -1), nodes[:, None].expand(-1, 3, 3, -1)
            apart = (to - of).square().sum(-1, keepdim=True)
            sent = torch.sigmoid(edge(torch.cat([to, of, apart], -1))) * of
            seen = sent.sum(2)
            seen += to.mean(2)
            nodes = nodes + node(torch.cat([nodes, seen], -1))
        return self.head(nodes.mean(1))


def messages() -> Task:
    return task(Messages)


class KeptByAModule(nn.Module):
    """A module keeps a value to itself, which the outermost forward reads later."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = torch.tanh(super().forward(x))
            return self.kept * 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.blocks[0].kept)


class Nested(nn.Module):
    """One class inside itself: calls of torch's functions stand at one place of code for each of its modules."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Nested(depth - 1) if depth else None
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH if depth < 2 else OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.inner is None else self.inner(x)
        kept = torch.tanh(x)  # which is given to no module
        return self.last(self.middle(self.first(x)) * kept)


def nested() -> Task:
    return task(lambda: Nested(2))


def kept_by_a_module() -> Task:
    return task(KeptByAModule)


class ReadsItsWeights(nn.Module):
    """Its constructor looks at random values, so it is built whole and rank 0's weights are handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.gain = float(self.blocks[0].weight.detach().abs().max())
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.gain
        return self.head(x)


def reads_its_weights() -> Task:
    return task(ReadsItsWeights)


class Pairs(nn.Module):
    """Embeddings for a loss over pairs of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.layers(x), dim=-1), self.scale


def _contrast(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    logits = output[0] @ output[0].flip(1).t() * output[1].exp()
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction="sum"), len(logits)


def pairs() -> Task:
    return task(Pairs, loss=_contrast, loss_scope="global")


def extra_terms() -> Task:
    """A loss with two extra terms, one with a weight of its own."""

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int, dict[str, Any]]:
        total, weight = squares(output, batch)
        size = output.square()
        return total, weight, {"plain": 0.1 * size.sum(), "weighed": (size[:, 0].sum(), float(len(output)) * 2)}

    return task(Residual, loss=loss)


class ThroughNumpy(nn.Module):
    """A hidden state that leaves PyTorch and comes back later."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        kept = torch.from_numpy(x.detach().numpy().copy())
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        return self.head(x + kept)


def through_numpy() -> Task:
    return task(ThroughNumpy)


class OneByOne(nn.Module):
    """Layers called for each sample alone, one of them for those whose first number is large, and a head for all."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.each = nn.Linear(WIDTH, WIDTH), nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUT))

    def forward(self, x: Tensor) -> Tensor:
        outs = []
        for row, sample in zip(self.enter(x), x, strict=True):
            hidden = torch.tanh(self.each[0](row))
            outs.append(self.each[1](hidden) if sample[0] > 0.5 else hidden)
        return self.head(torch.stack(outs))


def one_by_one() -> Task:
    return task(OneByOne)


class WritesFirst(nn.Module):
    """A layer that writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.layer(torch.tanh(x))


class WritesIntoSlices(nn.Module):
    """Layers that write into a slice of what the one before made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WritesFirst() for _ in range(4)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x = block(x)[:, WIDTH:]
        return self.head(x)


def writes_into_slices() -> Task:
    return task(WritesIntoSlices)


class ReadsTheBase(WritesIntoSlices):
    """Reads what the second layer made once more, after the third has written into a slice of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            made = block(x)
            x = made[:, WIDTH:]
            if block is self.blocks[1]:
                base = made
        return self.head(x) + base.sum(1, keepdim=True)


def reads_the_base() -> Task:
    return task(ReadsTheBase)


class GivesAll(nn.Module):
    """Layers whose sums, and slices of what they make, are in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        sums, slices = [], []
        for block in self.blocks:
            made = block(torch.tanh(x))
            x = made[:, WIDTH:]
            sums.append(made.sum())
            slices.append(made[:, 1:WIDTH])
        return self.head(x), sums, slices


def _writes(output: tuple[Tensor, list[Tensor], list[Tensor]], batch: Any) -> tuple[Tensor, int]:
    result, sums, slices = output
    total = sums[0]
    for term in sums[1:]:
        total += term
    for part in slices[:-1]:
        part *= batch["x"][:, 1:]
    return squares(result, batch)[0] + 0.01 * total + slices[0].sum(), len(result)


def loss_that_writes() -> Task:
    return task(GivesAll, loss=_writes)


def _softened(module: nn.Module, from_input: tuple, from_output: tuple) -> tuple:
    """What a backward hook gives in the gradients' place; torch calls it with None where an argument needs none."""
    return tuple(gradient if gradient is None else torch.tanh(3 * gradient) for gradient in from_input)


class Hooked(Residual):
    """Hooks on gradients around each block, and on the result of the whole and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(_softened)
        self.register_forward_hook(lambda module, args, result: result * 0.5)
        self.register_full_backward_pre_hook(lambda module, gradients: (gradients[0].clamp(-1, 1),))

    def forward(self, x: Tensor) -> Tensor:
        x = start = torch.tanh(self.head.weight.sum() * x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x + start)


def hooked() -> Task:
    return task(Hooked)


def hooked_around() -> Task:
    def make() -> nn.Module:
        blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        blocks.register_full_backward_hook(_softened)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, OUT))

    return task(make)
