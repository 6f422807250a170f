"""Many processes: Trawl's collectors and its peers', and hand-written loops side by side."""
