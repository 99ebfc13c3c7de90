"""Weights and gradients: tensors to segments, and to addresses."""
