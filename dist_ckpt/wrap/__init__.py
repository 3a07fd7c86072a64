"""Plan → a model that recomputes: in place, and without a trace in its module tree."""
