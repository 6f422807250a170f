"""Starting workers on other machines."""
