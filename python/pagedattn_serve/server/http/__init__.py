"""Serving any app over HTTP: sockets, connections, limits, keys, logs, health, metrics, the live page."""
