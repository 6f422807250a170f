"""Entries of frames that come from environments: samples of spaces, values of infos, masks."""
