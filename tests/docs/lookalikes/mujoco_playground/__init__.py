"""A stand-in with the interface of MuJoCo Playground, which compiles for a minute."""
