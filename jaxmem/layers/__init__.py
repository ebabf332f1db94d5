"""Layers that keep less for the backward pass than their plain forms."""
