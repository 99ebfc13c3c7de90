"""Engines: what executes a schedule, and how a group is made on one."""
