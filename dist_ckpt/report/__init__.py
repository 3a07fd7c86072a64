"""What a run shows and records. Only rank 0 prints."""
