"""How each operation of ATen carries labels. A rule returns whether it applied; if not, its inputs stay whole.

What an operation does on shares, once weights are cut, is told by its rule in `part/`: an operation may need both.
"""

from shardwise.trace.axis_rules import pointwise, products, reductions, views  # noqa: F401 - they register
from shardwise.trace.axis_rules.pointwise import elementwise
from shardwise.trace.axis_rules.registry import RULES

__all__ = ["RULES", "elementwise"]
