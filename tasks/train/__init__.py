"""The one training loop, for all methods."""
