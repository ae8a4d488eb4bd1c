"""Scales: where they come from, what shapes they have, which are refused."""
