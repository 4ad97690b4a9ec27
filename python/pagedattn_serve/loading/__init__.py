"""From a Hugging Face directory to a model: its files, the formats of its weights, what it says of generation."""
