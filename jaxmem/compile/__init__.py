"""Compilation of traced programs, here or for an absent accelerator."""
