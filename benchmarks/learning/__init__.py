"""How long agents take to reach a return, with Trawl's collectors and with TorchRL's."""
