"""A frozen model that answers from evidence alone: how it reads, and how the laptop's tiny one is trained."""
