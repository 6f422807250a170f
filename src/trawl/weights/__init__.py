"""Sends weights from a learner to policies that collect: through shared memory, or in messages."""
