"""Between text and token ids: the tokenizer, text from tokens as they come, stop strings."""
