"""The options of the server, each said once, and checked. The options of the engine are not among them."""

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from typing import Annotated

from pagedattn_serve.config import MAX_REPLICAS, check_bool, check_choice, check_float, check_int, check_text, read_file
from pagedattn_serve.errors import ArgumentError, ArgumentTypeError, nth
from pagedattn_serve.options import Flag, options_of, parts, size
from pagedattn_serve.output_parsing.output_format import check_parsers

ANY_HOST = ANY_ORIGIN = "*"
# Groups of the command line's help.
SERVER = "server"
REPLICAS = "replicas"
LIMITS = "limits"
LOG = "log, on standard error; it has no prompts, outputs or keys"


@dataclass(frozen=True)
class ServerConfig:
    """The options of a server, checked. Raises ValueError or TypeError; never with the text of a key."""

    host: Annotated[
        str,
        "name or address to listen on (default: 127.0.0.1, this machine alone)",
        Flag(SERVER),
    ] = "127.0.0.1"
    port: Annotated[int, "0 takes any that is free", Flag(SERVER)] = 8000
    uds: Annotated[
        str | None,
        "a unix socket to listen on, instead of host and port; whoever may write to the file may use the server",
        Flag(SERVER, "PATH"),
    ] = None
    ssl_certfile: Annotated[
        str | None, "certificate of the server, in PEM, with those that vouch for it: HTTPS", Flag(SERVER, "FILE")
    ] = None
    ssl_keyfile: Annotated[
        str | None, "private key of the certificate (default: in the certificate's file)", Flag(SERVER, "FILE")
    ] = None
    root_path: Annotated[
        str, "path under which a proxy serves this server, such as /llm; the proxy may cut it off", Flag(SERVER, "PATH")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...] | None,
        "names and addresses, with commas between them, by which requests may call the server in their header Host, "
        "beside localhost and --host; * is any (default: no others, but any if other machines can connect)",
        Flag(SERVER, "HOSTS", parts),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        "origins, with commas between them, such as https://chat.example: their web pages may call the server from a "
        "browser (CORS); * is any (default: none)",
        Flag(SERVER, "ORIGINS", parts),
    ] = ()
    api_keys: Annotated[
        tuple[str, ...],
        "asked of clients; may be repeated, any one will do. Other users of this machine can see it here, so rather "
        "set PAGEDATTN_API_KEY, to one or several with commas between them (default: none is asked for)",
        Flag(SERVER, "KEY", name="--api-key"),
    ] = field(default=(), repr=False)
    prefix_cache_per_key: Annotated[
        bool,
        "let prompts share cached blocks with those of the same API key alone, so that no client can tell by the time "
        "what another one asked",
        Flag(SERVER),
    ] = False
    served_model_name: Annotated[
        str | tuple[str, ...],
        "what clients call the model; of several names a request may have any, and answers and metrics have the first "
        "(default: the last part of MODEL)",
        Flag(SERVER, "NAME", several=True),
    ] = "demo_model"
    chat_template: Annotated[str | None, "Jinja, in place of the tokenizer's own", Flag(SERVER, "FILE")] = None
    tool_call_parser: Annotated[
        str,
        "how the model writes calls of functions: hermes, qwen3_coder, mistral, llama3_json and others, or none; auto "
        "looks at the chat template",
        Flag(SERVER, "NAME"),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        "how the model writes its thoughts, which messages then have apart: qwen3, deepseek_r1, mistral, gpt_oss or "
        "none; auto looks at the chat template",
        Flag(SERVER, "NAME"),
    ] = "auto"
    data_parallel_size: Annotated[
        int,
        "replicas of the engine, each a process with the whole model and a cache of its own; a request goes where the "
        "beginning of its prompt is cached, unless others would serve it sooner",
        Flag(REPLICAS),
    ] = 1
    max_waiting: Annotated[int, "requests that wait for the engine; more are refused, status 429", Flag(LIMITS)] = 1024
    max_body_size: Annotated[
        int, "of a request; a longer one is refused, status 413 (default: 16MiB)", Flag(LIMITS, "SIZE", size)
    ] = 16 << 20
    response_store_size: Annotated[
        int,
        "memory for responses that clients may go on from; the oldest give way, and with 0 none is kept "
        "(default: 64MiB)",
        Flag(LIMITS, "SIZE", size),
    ] = 64 << 20
    response_ttl: Annotated[float, "how long a response is kept", Flag(LIMITS, "SECONDS")] = 86400
    read_timeout: Annotated[
        float,
        "seconds in which the headers of a request have to come, and then its body; a client that leaves its answer "
        "lying has to take some of it within as many seconds",
    ] = 60
    request_timeout: Annotated[
        float,
        "for a request with its whole answer, which else ends in an error",
        Flag(LIMITS, "SECONDS"),
    ] = 3600
    shutdown_timeout: Annotated[
        float,
        "for requests in flight to end after SIGTERM or Ctrl-C, before they are aborted; a second signal waits for "
        "nothing",
        Flag(LIMITS, "SECONDS"),
    ] = 30
    log_format: Annotated[str, "text or json", Flag(LOG, "FORMAT")] = "text"
    log_level: Annotated[str, "debug, info, warning or error", Flag(LOG, "LEVEL")] = "info"

    def __post_init__(self) -> None:
        check_not_empty("host", self.host)
        check_int("port", self.port, 0, 65535)
        for name in ("uds", "ssl_certfile", "ssl_keyfile"):
            if (path := getattr(self, name)) is not None:
                check_not_empty(name, path)
        check_certificate(self.ssl_certfile, self.ssl_keyfile)
        check_root_path(self.root_path)
        check_origins(self.allowed_origins)
        check_model_names(self.served_model_name)
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        check_int("data_parallel_size", self.data_parallel_size, 1, MAX_REPLICAS)
        check_int("max_waiting", self.max_waiting, 1)
        check_int("max_body_size", self.max_body_size, 1)
        check_int("response_store_size", self.response_store_size, 0)
        check_float("response_ttl", self.response_ttl, 0, but=0)
        check_bool("prefix_cache_per_key", self.prefix_cache_per_key)
        check_float("read_timeout", self.read_timeout, 0, but=0)
        check_float("request_timeout", self.request_timeout, 0, but=0)
        check_float("shutdown_timeout", self.shutdown_timeout, 0)
        check_choice("log_format", self.log_format, ("text", "json"))
        check_choice("log_level", self.log_level, ("debug", "info", "warning", "error"))
        if self.prefix_cache_per_key and not self.api_keys:
            raise ArgumentError("prefix_cache_per_key", "False without API keys, by which prompts would be told apart")
        check_api_keys(self.api_keys)
        if self.allowed_hosts is not None:
            check_hosts(self.allowed_hosts)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model. The first one stands in answers and metrics."""
        return (self.served_model_name,) if isinstance(self.served_model_name, str) else self.served_model_name


OPTIONS = options_of(ServerConfig)


def check_not_empty(name: str, value: object) -> None:
    if not check_text(name, value):
        raise ArgumentError(name, "a text", "an empty one")


def check_texts(name: str, value: object) -> tuple[str, ...]:
    """The value. Raises TypeError unless it is a tuple of strings. The error tells types alone, as keys are secret."""
    if not isinstance(value, tuple):
        raise ArgumentTypeError(name, "a tuple of strings", type(value).__name__)
    for each in value:
        if not isinstance(each, str):
            raise ArgumentTypeError(name, "a tuple of strings", f"{type(each).__name__} among them")
    return value


def check_model_names(names: object) -> None:
    """Raise TypeError unless `names` is a string or a tuple of strings, ValueError unless there is a name and none is
    empty."""
    if isinstance(names, str):
        names = (names,)
    elif not isinstance(names, tuple):
        raise ArgumentTypeError("served_model_name", "a string or a tuple of strings", type(names).__name__)
    if not names:
        raise ArgumentError("served_model_name", "one name at least", "none")
    for name in names:
        check_not_empty("served_model_name", name)


def check_hosts(hosts: object) -> None:
    """Raise TypeError unless `hosts` is a tuple of strings, ValueError unless each can stand in a header Host."""
    for host in check_texts("allowed_hosts", hosts):
        if host != ANY_HOST and not is_host(host):
            raise ArgumentError(
                "allowed_hosts", f"names or addresses without scheme and port, or {ANY_HOST}", repr(host)
            )


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raise ValueError unless a server can prove by these files who it is, OSError if one cannot be read."""
    if certfile is None:
        if keyfile is not None:
            raise ArgumentError("ssl_keyfile", "none without ssl_certfile", keyfile)
        return
    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        if path is not None:
            read_file(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: "")
    except ssl.SSLError as error:
        files = certfile if keyfile is None else f"{certfile} and {keyfile}"
        expected = "a certificate in PEM, and its private key without a password"
        raise ArgumentError("ssl_certfile", expected, f"{files} ({error.reason or error})") from None


def check_root_path(path: object) -> None:
    text = check_text("root_path", path)
    if text and not re.fullmatch(r"(/[\w.~-]+)+", text, re.ASCII):
        raise ArgumentError("root_path", "a path that begins with / and ends with none, such as /llm", repr(path))


def check_origins(origins: object) -> None:
    """Raise TypeError unless `origins` is a tuple of strings, ValueError unless browsers send each as Origin."""
    for origin in check_texts("allowed_origins", origins):
        scheme, separator, rest = origin.partition("://")
        host = re.sub(r":\d+$", "", rest)
        is_origin = separator and re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) and is_host(host) and rest == rest.lower()
        if origin != ANY_ORIGIN and not is_origin:
            expected = f"origins such as https://chat.example or http://localhost:3000, without a path, or {ANY_ORIGIN}"
            raise ArgumentError("allowed_origins", expected, repr(origin))


def is_host(text: str) -> bool:
    """Whether the text is a name or an address. An address of version 6 may have brackets around it."""
    try:
        ipaddress.ip_address(text[1:-1] if text.startswith("[") and text.endswith("]") else text)
    except ValueError:
        return re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?", text, re.IGNORECASE) is not None
    return True


def check_api_keys(keys: object) -> None:
    """Raise TypeError unless `keys` is a tuple of strings, ValueError unless a header can carry each of them."""
    texts = check_texts("api_keys", keys)
    for i, key in enumerate(texts):
        place = nth("key", i, len(texts))
        if not key:
            raise ArgumentError("api_keys", f"a text for {place}", "an empty one")
        if not all("!" <= character <= "~" for character in key):
            raise ArgumentError("api_keys", "printable ASCII without spaces", f"another character in {place}")
