"""Jobs: programs from a user's module, to be compiled or verified by the command line.

`job` is the value, `load` finds and builds it, `verify` runs it in a separate process
(`measure`) and compares the prediction with the allocator's peak.
"""
