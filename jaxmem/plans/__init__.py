"""Plans as plain data: how a stack is cut and what is kept; from a policy and sizes to a plan."""
