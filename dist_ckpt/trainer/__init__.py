"""The ready-made training program: configuration, model, data, loop and training states."""
