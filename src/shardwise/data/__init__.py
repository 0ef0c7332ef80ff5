"""Data: from positions to samples to this rank's parts, and two small data sets that need no download."""

from shardwise.data.corpus import BytesSource, Corpus, split, standard_library_corpus, write_corpus
from shardwise.data.digits import DigitsSource, digits_split
from shardwise.data.evaluation import evaluation_parts
from shardwise.data.loader import Loader
from shardwise.data.order import Order
from shardwise.data.wrap import as_source
from shardwise.engine.batching import parts_of, samples_in

__all__ = [
    "BytesSource",
    "Corpus",
    "DigitsSource",
    "Loader",
    "Order",
    "as_source",
    "digits_split",
    "evaluation_parts",
    "parts_of",
    "samples_in",
    "split",
    "standard_library_corpus",
    "write_corpus",
]
