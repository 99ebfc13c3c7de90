"""Plans as pure data, and the NumPy definitions of planner, schedule and reroute."""
