"""Runs as pages: one HTML file each, which needs nothing else."""
