"""One optimizer step over micro-batches, and what surrounds it. torch, no Ray."""
