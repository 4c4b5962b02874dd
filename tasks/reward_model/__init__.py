"""PiCA's reward model: a language model with one number at the end, which estimates how likely a right answer is.

It reads the question and the turns so far, and after each action gives f(t), the probability that the final answer will
be right. Here stand how trajectories are labelled, the text that the model reads, its losses, its training, its
figures, and how it scores. The rows of trajectories and labels are in `tasks/records/played.py`.
"""
