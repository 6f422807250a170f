"""Workers, buffers, weights and evaluations in actors of Ray."""
