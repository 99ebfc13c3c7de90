"""Groups: ranks that replicate experts among each other, and their life."""
