"""A user's function as a jaxpr, and what is found in it.

`context` is what holds while a function is traced, `find` looks for layer stacks, `layer` takes one
layer apart for reverse mode.  `names`, `origin`, `source` and `arguments` say what a value is to
the person who wrote the code; `residuals` lists what a backward pass reads.
"""
