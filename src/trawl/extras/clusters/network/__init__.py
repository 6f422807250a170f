"""Workers that are reached over a network: connections, messages and weights."""
