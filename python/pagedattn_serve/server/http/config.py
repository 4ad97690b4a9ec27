"""The options of the server, checked once, at construction. The options of the engine are not among them."""

import ipaddress
import re
from dataclasses import dataclass, field

from pagedattn_serve.config import check_bool, check_float, check_int, check_text
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
ANY_HOST = "*"


@dataclass(frozen=True)
class ServerConfig:
    """Defaults are those of `pagedattn serve`.

    host: name or address to listen on. port: 0 takes any free port.
    allowed_hosts: names and addresses that requests may have in their header Host, beside `host` and the names of this
        machine's loopback. "*" allows all. None allows all, unless the server listens to loopback addresses alone.
    api_keys: a request has to bring one of these keys. If there are none, no key is asked for.
    served_model_name: what clients call the model.
    max_waiting: most requests that wait for the engine; more are refused with status 429.
    max_body_bytes: most bytes of a request's body; a longer body is refused with status 413.
    read_timeout: seconds in which the headers of a request have to come, and then its body. A client that leaves its
        answer lying has to take some of it within as many seconds.
    request_timeout: most seconds from the headers of a request to the end of its answer.
    shutdown_timeout: seconds that requests in flight have to end, once the server is told to stop.
    chat_template: the text of a template, in place of the tokenizer's.
    salt_by_key: whether prompts share cached blocks only with prompts that came with the same key.

    Raises ValueError or TypeError; never with the text of a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_name: str = "demo_model"
    max_waiting: int = 1024
    max_body_bytes: int = 16 << 20
    read_timeout: float = 60.0
    request_timeout: float = 3600.0
    shutdown_timeout: float = 30.0
    chat_template: str | None = None
    salt_by_key: bool = False
    log_format: str = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        check_not_empty("host", self.host)
        check_int("port", self.port, 0, 65535)
        check_not_empty("served_model_name", self.served_model_name)
        check_int("max_waiting", self.max_waiting, 1)
        check_int("max_body_bytes", self.max_body_bytes, 1)
        check_bool("salt_by_key", self.salt_by_key)
        for name in ("read_timeout", "request_timeout", "shutdown_timeout"):
            check_float(name, getattr(self, name))
        for name in ("read_timeout", "request_timeout"):
            if getattr(self, name) <= 0:
                raise ArgumentError(name, "a number of seconds > 0", getattr(self, name))
        if self.shutdown_timeout < 0:
            raise ArgumentError("shutdown_timeout", "a number of seconds >= 0", self.shutdown_timeout)
        for name, choices in (("log_format", LOG_FORMATS), ("log_level", LOG_LEVELS)):
            if getattr(self, name) not in choices:
                raise ArgumentError(name, f"{' or '.join(choices)}", repr(getattr(self, name)))
        if self.salt_by_key and not self.api_keys:
            raise ArgumentError("salt_by_key", "False without API keys, by which prompts would be told apart")
        check_api_keys(self.api_keys)
        if self.allowed_hosts is not None:
            check_hosts(self.allowed_hosts)


def check_not_empty(name: str, value: object) -> None:
    if not check_text(name, value):
        raise ArgumentError(name, "a text", "an empty one")


def check_hosts(hosts: object) -> None:
    """Raise TypeError unless `hosts` is a tuple of strings, ValueError unless each can stand in a header Host."""
    if not isinstance(hosts, tuple) or not all(isinstance(host, str) for host in hosts):
        raise ArgumentTypeError("allowed_hosts", "a tuple of strings")
    for host in hosts:
        if host != ANY_HOST and not is_host(host):
            raise ArgumentError(
                "allowed_hosts", f"names or addresses without scheme and port, or {ANY_HOST}", repr(host)
            )


def is_host(text: str) -> bool:
    """Whether the text is a name or an address. An address of version 6 may have brackets around it."""
    try:
        ipaddress.ip_address(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    except ValueError:
        return re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", text, re.IGNORECASE) is not None
    return True


def check_api_keys(keys: object) -> None:
    """Raise TypeError unless `keys` is a tuple of strings, ValueError unless a header can carry each of them."""
    if not isinstance(keys, tuple) or not all(isinstance(key, str) for key in keys):
        raise ArgumentTypeError("api_keys", "a tuple of strings")
    for i, key in enumerate(keys):
        place = f"key {i + 1} of {len(keys)}"
        if not key:
            raise ArgumentError("api_keys", f"a text for {place}", "an empty one")
        if not all("!" <= character <= "~" for character in key):
            raise ArgumentError("api_keys", "printable ASCII without spaces", f"another character in {place}")
