"""A command each: what can be asked, and what is measured."""
