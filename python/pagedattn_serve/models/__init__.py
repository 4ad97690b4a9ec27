"""One file a model family, read top to bottom; `loader` fills them from a checkpoint."""
