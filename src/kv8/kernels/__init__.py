"""Native kernels: raw tensors in, raw tensors out; unaware of layers, batches and engines."""
