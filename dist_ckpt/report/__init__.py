"""What a person sees of a run. Rank 0 alone speaks."""
