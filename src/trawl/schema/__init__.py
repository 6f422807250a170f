"""Schema of states, which may come from strangers, and are checked before they are used."""
