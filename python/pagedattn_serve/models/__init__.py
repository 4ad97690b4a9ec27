"""One file a model family, read top to bottom, and what they share."""
