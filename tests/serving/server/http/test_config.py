"""What the server's config takes and refuses."""

import math
from typing import Any

import pytest

from pagedattn_serve.server.http.config import ServerConfig


def test_the_defaults_listen_to_this_machine_alone() -> None:
    config = ServerConfig()
    assert (config.host, config.port, config.api_keys, config.prefix_cache_per_key) == ("127.0.0.1", 8000, (), False)
    assert config.model_names == ("demo_model",)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("host", "", ValueError, "host: expected a text, got an empty one"),
        ("port", 65536, ValueError, "port: expected an int in [0, 65535], got 65536"),
        ("port", "80", TypeError, "port: expected an int, got '80' of type str"),
        ("served_model_name", None, TypeError, "served_model_name: expected a string or a tuple of strings, got NoneT"),
        ("served_model_name", ["a"], TypeError, "served_model_name: expected a string or a tuple of strings, got list"),
        ("served_model_name", ("a", 5), TypeError, "served_model_name: expected a string, got int"),
        ("served_model_name", (), ValueError, "served_model_name: expected one name at least, got none"),
        ("served_model_name", ("a", ""), ValueError, "served_model_name: expected a text, got an empty one"),
        ("max_waiting", 0, ValueError, "max_waiting: expected an int >= 1, got 0"),
        ("max_body_size", 0, ValueError, "max_body_size: expected an int >= 1, got 0"),
        ("read_timeout", 0, ValueError, "read_timeout: expected a number > 0, got 0"),
        ("request_timeout", math.inf, ValueError, "request_timeout: expected a finite number, got inf"),
        ("shutdown_timeout", -1, ValueError, "shutdown_timeout: expected a number >= 0, got -1"),
        ("log_format", "xml", ValueError, "log_format: expected one of text, json, got 'xml'"),
        ("log_level", "all", ValueError, "log_level: expected one of debug, info, warning, error, got 'all'"),
        (
            "prefix_cache_per_key",
            True,
            ValueError,
            "prefix_cache_per_key: expected False without API keys, by which",
        ),
        ("api_keys", "secret", TypeError, "api_keys: expected a tuple of strings, got str"),
        ("api_keys", ("secret", b"secret"), TypeError, "api_keys: expected a tuple of strings, got bytes among them"),
        ("allowed_hosts", "box", TypeError, "allowed_hosts: expected a tuple of strings, got str"),
        ("allowed_origins", "https://box", TypeError, "allowed_origins: expected a tuple of strings, got str"),
        (
            "allowed_origins",
            ("box.example",),
            ValueError,
            "allowed_origins: expected origins such as https://chat.exam",
        ),
        ("allowed_origins", ("https://box.example/",), ValueError, "allowed_origins: expected origins such as https:/"),
        ("root_path", "llm", ValueError, "root_path: expected a path that begins with / and ends with none, such as /"),
        ("root_path", "/llm/", ValueError, "root_path: expected a path that begins with / and ends with none, such a"),
        ("uds", "", ValueError, "uds: expected a text, got an empty one"),
        ("ssl_keyfile", "key.pem", ValueError, "ssl_keyfile: expected none without ssl_certfile, got key.pem"),
        ("ssl_certfile", "/nowhere", FileNotFoundError, "ssl_certfile: expected a file that can be read, got /nowhere"),
        ("ssl_certfile", __file__, ValueError, "ssl_certfile: expected a certificate in PEM, and its private key with"),
    ],
)
def test_what_is_refused(field: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        ServerConfig(**{field: value})
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("host", ["", "http://box", "box:80", "box/", "*.example", "two words", "[box]", "a..b"])
def test_a_host_that_no_header_would_name(host: str) -> None:
    with pytest.raises(
        ValueError, match=r"^allowed_hosts: expected names or addresses without scheme and port"
    ) as raised:
        ServerConfig(allowed_hosts=("box.example", "*", "10.0.0.1", "::1", "[::1]", host))
    assert str(raised.value).endswith(f"got {host!r}")


def test_origins_that_browsers_send() -> None:
    origins = ("*", "https://chat.example", "http://localhost:3000", "http://[::1]:8080", "app://obsidian.md")
    assert ServerConfig(allowed_origins=origins).allowed_origins == origins


@pytest.mark.parametrize("key", ["", "two words", "line\n", "schlüssel", "tab\t", "\x7f"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match=r"^api_keys: expected .* key 2 of 2") as raised:
        ServerConfig(api_keys=("right", key))
    assert not key or key not in str(raised.value)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))
