"""The HTTP server on the engine: `http` would serve any app, `openai` is the one."""
