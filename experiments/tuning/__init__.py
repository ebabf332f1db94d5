"""Models that are fine-tuned in `fine_tuning_memory.py`."""
