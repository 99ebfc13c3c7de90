"""Weights and gradients: from tensors to segments and addresses."""
