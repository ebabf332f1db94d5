"""What a plan will need, before a compiler is asked: bytes, FLOPs and seconds.

`counting` counts operations in a jaxpr, `costs` sums them, `roofline` and `measured` turn them
into seconds.  `arrays` says which values are in memory, `liveness` counts live bytes, `backward` is
a layer's backward pass operation by operation, `interleaved` its order outside of loops, `reversal`
what is live while it runs, and `values` one layer as the solvers see it.
"""
