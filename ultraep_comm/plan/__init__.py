"""Plans: pure data, and the NumPy definitions of what makes them. No group here."""
