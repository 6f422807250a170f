"""New weights for policies that collect: what they cost the learner, and the workers."""
