"""Workers in processes on this machine."""
