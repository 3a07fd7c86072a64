"""What a recompute would disturb, and how it is put right or refused."""
