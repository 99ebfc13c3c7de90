"""The calls on a group, one module each."""
