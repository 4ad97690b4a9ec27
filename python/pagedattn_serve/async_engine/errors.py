"""Why `AsyncLLMEngine` does not take a request, or does not finish it."""


class EngineBusyError(RuntimeError):
    """As many requests wait as may; this one was not queued."""


class EngineDeadError(RuntimeError):
    """The engine does not run: not yet, not any more, or it broke."""


class ReplicaDeadError(EngineDeadError):
    """The replica that had the request died. Other replicas go on, and this one is started anew."""
