"""Machine code for loops of the host decision, cached on disk where a folder for it can be written.

Compiled code must give the same numbers, bit for bit, as the NumPy form it replaces: nothing here
reorders a sum or contracts a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as machine code, cached beside its source or, failing that, per process."""
    try:
        made: Callable[..., Any] = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # no folder for the cache can be written
        made = numba.njit(error_model="numpy")(function)
    return made
