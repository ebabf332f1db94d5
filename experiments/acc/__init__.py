"""Ways to accumulate gradients, held against each other, for `accumulation.py`.

The way of the data: `forms` are the contestants; `exactness`, `memory` and `speed` each ask one
question of all of them; `table` is what they answer in and `picture` draws it.

Shapes: B rows, T tokens, D the width, M microbatches.  P is the bytes of the parameters in float32.
"""
