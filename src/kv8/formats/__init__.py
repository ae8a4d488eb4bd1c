"""Numeric formats: what the bits of a stored key or value mean. Nothing here knows of models."""
