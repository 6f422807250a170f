"""Parts that every collector has: frames, delivery, background, checkpoints, weights."""
