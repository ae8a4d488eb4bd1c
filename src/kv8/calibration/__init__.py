"""Observes keys, values and queries where attention is computed, and makes scales of them."""
