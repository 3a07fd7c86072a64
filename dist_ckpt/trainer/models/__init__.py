"""Models that the training program builds."""
