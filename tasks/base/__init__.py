"""The start policy: a tiny model taught to read and copy, then shown imperfect behaviour; or a given model folder."""
