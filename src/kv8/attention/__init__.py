"""Attention over stored codes: one operation set, one specification, several backends."""
