"""The c10d engine: experts move by point-to-point operations of torch.distributed."""
