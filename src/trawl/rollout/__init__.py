"""The engine: one loop that steps an environment with a policy into a block of memory."""
