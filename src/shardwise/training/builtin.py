"""The built-in tasks (names and defaults: config/schema): a decoder on text, a vision transformer on digits.

text    the next byte of Python's standard library, or the next token of text files, 5 % of them held out
digits  scikit-learn's handwritten digits, a fifth of them held out

Everything in a task is a top-level function or a partial of one, so a task can be sent to the ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.config.schema import TaskSection
from shardwise.dataset import Source
from shardwise.task import Task

if TYPE_CHECKING:
    from torch import Tensor


def text_task(section: TaskSection) -> Task:
    """Returns the built-in task "text": a decoder that predicts the next token, with the sizes of the section."""
    from shardwise.models import Decoder, DecoderConfig

    sizes = _sizes(section)
    assert section.seq_len is not None
    data, held_out, vocab = _text(section)
    config = DecoderConfig(
        vocab=vocab,
        context=section.seq_len,
        kv_heads=section.model.kv_heads or sizes["heads"],
        **sizes,
    )
    return Task(
        model=partial(Decoder, config),
        loss=next_token_loss,
        data=data,
        eval_data=held_out,
        inputs=all_but_last,
        name="text",
    )


def _text(section: TaskSection) -> tuple[Source, Source, int]:
    """Returns (training source, held-out source, size of the vocabulary)."""
    from shardwise.data import TokenSource, split, standard_library_corpus, tokenized
    from shardwise.data.tokenizer import BYTES, read_tokenizer

    assert section.seq_len is not None
    if not section.files:
        return *split(standard_library_corpus(), section.seq_len), BYTES
    vocab = read_tokenizer(section.tokenizer).vocab
    assert vocab is not None
    tokens = TokenSource(tokenized(section.files, section.tokenizer), section.seq_len, vocab=vocab)
    return *tokens.split(), vocab


def digits_task(section: TaskSection) -> Task:
    """Returns the built-in task "digits": a vision transformer that classifies 8 x 8 images of digits."""
    from shardwise.data import digits_split
    from shardwise.models import ViT, ViTConfig

    config = ViTConfig(image=8, channels=1, classes=10, patch=section.model.patch or 2, **_sizes(section))
    data, held_out = digits_split()
    return Task(
        model=partial(ViT, config),
        loss=digit_loss,
        data=data,
        eval_data=held_out,
        inputs=image_only,
        name="digits",
    )


def _sizes(section: TaskSection) -> dict[str, Any]:
    """Returns the constructor arguments that both models share: layers, hidden, heads, intermediate, dropout."""
    model = section.model
    assert model.layers and model.hidden and model.heads
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "intermediate": model.intermediate or 4 * model.hidden,
        "dropout": model.dropout,
    }


def all_but_last(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    """Returns the model's (args, kwargs): the tokens (B, S) of windows (B, S + 1) without each window's last."""
    return (batch["tokens"][:, :-1],), {}


def next_token_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Returns (sum of the cross entropies of all next tokens, number of tokens); `logits`: (B, S, vocab)."""
    from torch.nn.functional import cross_entropy

    targets = batch["tokens"][:, 1:]  # (B, S)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def image_only(batch: dict[str, Tensor]) -> tuple[tuple, dict]:
    """Returns the model's (args, kwargs): the images (B, 1, 8, 8) of the batch."""
    return (batch["image"],), {}


def digit_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Returns (sum of the cross entropies of all images, number of images); `logits`: (B, 10)."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"])
