"""A stand-in with the interface of Isaac Lab, which needs Isaac Sim and a GPU."""
