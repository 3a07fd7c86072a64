"""Training states on disk: weights, optimizer moments and generators, independent of engine and number of ranks."""
