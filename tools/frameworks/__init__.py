"""Frameworks' real code on a CPU, with and without replicas."""
