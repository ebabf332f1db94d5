"""Programs to be judged, as a user's module hands them over: found, built, compiled, verified.

`job` is the value, `load` finds and builds it, `verify` runs it in a process of its own
(`measure`) and holds the prediction against the allocator.
"""
