"""What `foreign_models.py` is made of.

In the order of the data flow: the models of `transformers` (`nets`), a train step of one
(`training`), one row per compiled program (`table`), what makes the rows (`study`), the `picture`.
"""
