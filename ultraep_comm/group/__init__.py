"""Groups of ranks that replicate experts among each other, from creation to close."""
