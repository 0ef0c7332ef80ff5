"""Data: sources of the usual kinds, sample order, loaders that read this rank's part, and two small data sets.

`tiles` is imported at its first use, since it imports the engine: that costs a second, in worker processes too.
"""

from typing import TYPE_CHECKING, Any

from shardwise.data.arrays import ArraySource
from shardwise.data.blend import Blend
from shardwise.data.corpus import BytesSource, Corpus, split, standard_library_corpus, write_corpus
from shardwise.data.digits import DigitsSource, digits_split
from shardwise.data.evaluation import evaluation_parts
from shardwise.data.fields import FieldSource
from shardwise.data.jsonl import JsonlSource
from shardwise.data.loader import Loader
from shardwise.data.order import Order
from shardwise.data.ray_rows import RaySource
from shardwise.data.tokenized import tokenized
from shardwise.data.tokens import TokenSource
from shardwise.dataset import as_source
from shardwise.step.batching import parts_of, samples_in

if TYPE_CHECKING:
    from shardwise.data.tiles import TileSource, own_tile, predict_to

__all__ = [
    "ArraySource",
    "Blend",
    "BytesSource",
    "Corpus",
    "DigitsSource",
    "FieldSource",
    "JsonlSource",
    "Loader",
    "Order",
    "RaySource",
    "TileSource",
    "TokenSource",
    "as_source",
    "digits_split",
    "evaluation_parts",
    "own_tile",
    "parts_of",
    "predict_to",
    "samples_in",
    "split",
    "standard_library_corpus",
    "tokenized",
    "write_corpus",
]


def __getattr__(name: str) -> Any:
    if name not in ("TileSource", "own_tile", "predict_to"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shardwise.data import tiles

    return getattr(tiles, name)
