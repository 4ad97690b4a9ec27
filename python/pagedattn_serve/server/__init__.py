"""The HTTP server on the engine: OpenAI's API, and what it takes to run it."""
