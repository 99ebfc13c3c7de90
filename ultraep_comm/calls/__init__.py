"""The calls on a group, a module each, in the order of the data flow."""
