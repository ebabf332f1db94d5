"""Ways to accumulate gradients, compared by `accumulation.py`.

`forms` are the ways; `exactness`, `memory` and `speed` each answer one question for all of
them; `table` holds the answers and `picture` draws them.

Shapes: B rows, T tokens, D the width, M microbatches.  P is the bytes of the parameters in float32.
"""
