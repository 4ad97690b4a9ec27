"""OpenAI's API on the engine: routes, bodies, streams."""
