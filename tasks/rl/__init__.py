"""Reinforcement learning: what is drawn, which of it is kept, how it is weighed and which loss it gives.

Advantages and losses are arithmetic on tensors. Samplers play questions, filters choose among what was played.
"""
