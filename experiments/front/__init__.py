"""What `frontier.py` is made of.

In the order of the data's way: the policies that others use (`rivals`), one row for each
compiled program (`table`), what the rows say of each claim (`claims`), the `picture`.
"""
