"""What `frontier.py` is made of.

In the order of the data flow: the policies in use (`rivals`), one row per compiled program
(`table`), what the rows say about each claim (`claims`), the `picture`.
"""
