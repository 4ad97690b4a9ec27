"""What it takes to serve an app over HTTP: sockets, connections, limits, keys, logs, health, metrics, the live page."""
