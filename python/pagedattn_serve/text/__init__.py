"""Between text and token ids: the tokenizer, chat templates, text from tokens as they come, stop strings."""
