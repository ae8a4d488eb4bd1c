"""Models: where they come from, what they look like, and transformers' own code, hooked."""
