"""Atomic files, strict records, numbers as text: general helpers."""
