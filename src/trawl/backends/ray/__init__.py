"""Workers as actors of Ray."""
