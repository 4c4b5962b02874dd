"""Arithmetic of reinforcement learning: advantages, losses, filters, packing; tensors in, tensors out."""
