"""Between text and token ids: the tokenizer, and text from tokens as they come."""
