"""Several processes that serve one model."""
