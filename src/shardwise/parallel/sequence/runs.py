"""Indices of queries and keys that attention takes together."""

from __future__ import annotations

import numpy as np

Range = tuple[int, int]
At = Range | np.ndarray  # global indices: a range, or each of them
