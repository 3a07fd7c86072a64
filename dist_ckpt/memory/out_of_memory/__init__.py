"""When memory is used up: limits on it, how the failure is recognized, and what was alive then."""
