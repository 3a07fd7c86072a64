"""Sweeps: one training run under several policies, each in processes of its own, compared in one table."""
