"""Engines execute schedules; each creates its part of a group."""
