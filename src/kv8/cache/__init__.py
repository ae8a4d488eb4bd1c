"""The paged KV cache: layout and capacity, blocks, prefix reuse, and the tensors themselves."""
