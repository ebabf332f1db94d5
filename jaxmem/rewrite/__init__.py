"""A policy applied to a function as it stands: traced, searched, rewritten.

`apply` does it, `check` says what is wrong or without effect before anything runs, `scope` settles
which policy holds for a layer that is decorated inside of a decorated stack, and `inspect` lists
the stacks with their plans.
"""
