"""Optimal checkpointing of a uniform chain when a slot may hold a tape instead of a carry.

Mixed schedules (Maddison 2024, *On the implementation of checkpointing with
high-level algorithmic differentiation*): as in `jaxmem.solve.revolve`, the
initial state counts as one slot, but a layer whose tape is held is reversed
without being evaluated again.  It bounds what `revolve` could gain from slots
of tapes, where tape and carry are of one size.
"""

import numpy as np


def mixed_steps(n: int, slots: int) -> int:
    """Fewest forward steps beyond the first n, for n layers and `slots` carries or tapes.

    Evaluated by the recurrence of the paper, in O(n² slots).

    >>> [mixed_steps(10, s) for s in (2, 3, 4, 5, 8)]
    [16, 9, 7, 5, 2]
    """
    lengths = np.arange(n + 1)
    steps = np.maximum(lengths * (lengths + 1) // 2 - 1, lengths)
    for s in range(2, min(slots, n - 1) + 1):
        fewer, steps = steps, lengths.copy()
        for m in range(s + 2, n + 1):
            # The first layer's tape is held, or a carry i layers on.
            further = lengths[2:m] + steps[2:m] + fewer[m - 2 : 0 : -1]
            steps[m] = min(1 + fewer[m - 1], further.min())
    return int(steps[n]) - n
