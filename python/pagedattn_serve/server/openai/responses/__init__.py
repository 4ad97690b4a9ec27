"""OpenAI's Responses API: items in, items out, which are kept for a while."""
