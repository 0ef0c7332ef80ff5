"""How each operation of ATen carries labels (trace/axes). An operation may need its rule on shares, in part/, too.

A rule returns whether it applied; if not, the inputs stay whole. Rules in `part/` act once weights are cut.
"""

from shardwise.trace.axis_rules import complexes, pointwise, products, reductions, views  # noqa: F401 - they register
from shardwise.trace.axis_rules.pointwise import elementwise
from shardwise.trace.axis_rules.registry import RULES

__all__ = ["RULES", "elementwise"]
