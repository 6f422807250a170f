"""The inner loop, which steps an environment with a policy and fills batches."""
