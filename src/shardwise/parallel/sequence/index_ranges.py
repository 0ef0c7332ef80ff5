"""Types for the indices of queries and keys that attention takes together: a range, or single ones."""

from __future__ import annotations

import numpy as np

Range = tuple[int, int]
At = Range | np.ndarray  # global indices: a range, or each of them
