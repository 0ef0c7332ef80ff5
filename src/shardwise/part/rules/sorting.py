"""Sorts and ranks (quantiles, modes): of rows that lie together; on tiles cuts of their dim lie elsewhere meanwhile."""

from __future__ import annotations

from shardwise.part.dimwise import over
from shardwise.part.tiles.entire import Needs, needs_whole

over("topk", "sort", "argsort")
for _name, _needs in {
    "sort": Needs("dim descending"), "argsort": Needs("dim descending"), "msort": Needs("", 0), "topk": Needs("k dim"),
    "kthvalue": Needs("k dim keepdim", gone=True), "mode": Needs("dim keepdim", gone=True),
    "median": Needs("dim keepdim", None, gone=True), "nanmedian": Needs("dim keepdim", None, gone=True),
    "quantile": Needs("q dim keepdim", None, gone=True), "nanquantile": Needs("q dim keepdim", None, gone=True),
}.items():  # fmt: skip
    needs_whole(_name, _needs)
