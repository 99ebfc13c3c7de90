"""Plans as pure data: topology, rules, bounds, certificates and forecasts."""
