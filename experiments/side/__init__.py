"""What `gpu_side_by_side.py` and `big_batch.py` are made of."""
