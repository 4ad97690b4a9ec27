"""The options of `pagedattn serve`: what becomes of them, and of mistakes. tests/serving/server/ starts it."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from test_cli import HIDDEN, run_without
from warm_python import run_python

import pagedattn_serve.cli.serve
from pagedattn_serve import DEMO_MODEL, EngineArgs, LLMEngine
from pagedattn_serve.cli import main
from pagedattn_serve.cli.commands import SERVER_FLAGS, make_parser
from pagedattn_serve.errors import how_to_install
from pagedattn_serve.server.http.config import OPTIONS, ServerConfig

SERVER = ["fastapi", "httptools", "jinja2", "prometheus_client", "uvicorn"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configs that were served with, in place of a server."""
    configs: list[ServerConfig] = []

    def run_server(make_app, engine: Any, config: ServerConfig, sockets: list[Any]) -> int:
        for each in sockets:
            each.close()
        configs.append(config)
        return 0

    monkeypatch.delenv("PAGEDATTN_API_KEY", raising=False)
    monkeypatch.setattr(pagedattn_serve.cli.serve, "run_server", run_server)
    monkeypatch.setattr(pagedattn_serve.cli.serve, "make_engine", lambda *args: None)
    monkeypatch.setattr(pagedattn_serve.cli.serve, "set_up_logs", lambda *args: None)
    return configs


def test_the_defaults_are_those_of_the_config(served: list[ServerConfig]) -> None:
    assert main(["serve", "--port", "0"]) == 0
    assert served == [ServerConfig(port=0)]
    assert make_parser().parse_args(["serve"]).port == ServerConfig().port


def test_every_option_of_the_server_has_a_flag_but_one_and_is_explained() -> None:
    assert {*SERVER_FLAGS, "read_timeout"} == set(OPTIONS)
    assert all(f"\n    {name}: {option.help}." in f"{ServerConfig.__doc__}" for name, option in OPTIONS.items())


def test_all_options(served: list[ServerConfig], tmp_path: Path) -> None:
    (tmp_path / "name-7b").mkdir()
    (tmp_path / "name-7b" / "config.json").write_text("{}")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }} ü", encoding="utf-8")
    arguments = ["serve", f"{tmp_path}/name-7b/", "--host", "localhost", "--port", "0", "--api-key", "a"]
    arguments += ["--api-key", "b", "--prefix-cache-per-key", "--chat-template", str(template), "--max-waiting", "7"]
    arguments += ["--max-body-size", "1MiB", "--request-timeout", "8.5", "--shutdown-timeout", "0"]
    arguments += ["--log-format", "json", "--log-level", "debug", "--allowed-hosts", "box.example,10.0.0.1"]
    assert main(arguments) == 0
    assert main([*arguments, "--served-model-name", "other", "another"]) == 0
    expected = ServerConfig(
        host="localhost",
        port=0,
        allowed_hosts=("box.example", "10.0.0.1"),
        api_keys=("a", "b"),
        served_model_name="name-7b",
        max_waiting=7,
        max_body_size=1 << 20,
        request_timeout=8.5,
        shutdown_timeout=0,
        chat_template="{{ messages }} ü",
        prefix_cache_per_key=True,
        log_format="json",
        log_level="debug",
    )
    assert served[0] == expected and served[1].model_names == ("other", "another")


@pytest.mark.parametrize(
    ("variable", "options", "keys"),
    [
        ("one", [], ("one",)),
        ("one,two", [], ("one", "two")),
        ("one", ["--api-key", "three"], ("three",)),
        (None, [], ()),
    ],
)
def test_keys_of_the_environment(
    served: list[ServerConfig],
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    options: list[str],
    keys: tuple[str, ...],
) -> None:
    if variable is not None:
        monkeypatch.setenv("PAGEDATTN_API_KEY", variable)
    assert main(["serve", "--port", "0", *options]) == 0
    assert served[0].api_keys == keys


def test_the_first_line_comes_before_imports_that_take_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what is loaded, and from where."""

    def imports() -> None:
        raise ImportError("of what takes long")

    monkeypatch.setattr(pagedattn_serve.cli.serve, "import_transformers_without_torch", imports)
    caplog.set_level("INFO")
    args = EngineArgs(DEMO_MODEL, dtype="float16", quantization="int4", tensor_parallel_size=2)
    with pytest.raises(ImportError, match="of what takes long"):
        pagedattn_serve.cli.serve.make_engine(args, ServerConfig(data_parallel_size=3))
    what = f"LlamaForCausalLM, in float16, in int4 from {DEMO_MODEL}"
    assert caplog.messages == [f"loading {what}; replicas: 3, ranks of each: 2"]


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"]])
def test_the_defaults_of_the_engine_are_the_engines(command: list[str]) -> None:
    args = vars(make_parser().parse_args(command))
    parameters = inspect.signature(LLMEngine).parameters
    shared = {name: value for name, value in args.items() if name in parameters and name not in ("model", "seed")}
    assert len(shared) == 29
    for name, value in shared.items():
        assert value == parameters[name].default, name


def test_a_variable_that_was_left_empty_does_not_open_the_server(
    served: list[ServerConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_API_KEY", "")
    assert main(["serve", "--port", "0"]) == 2
    line = "pagedattn: error: PAGEDATTN_API_KEY: expected a text for key 1 of 1, got an empty one\n"
    assert capsys.readouterr().err == line and not served


def test_ray_serve_checks_a_template_as_the_command_does(tmp_path: Path) -> None:
    """On Ray a template with an error was deployed, and each chat failed. Of ray there are here the names alone."""
    template = tmp_path / "open.jinja"
    template.write_text("{% if")
    program = (
        "import sys; from unittest.mock import MagicMock\n"
        "sys.modules |= {'ray': MagicMock(), 'ray.serve': MagicMock()}\n"
        "from pagedattn_serve.ray_serve import read_args\n"
        "assert read_args({'model': 'some/name/'})[1].served_model_name == 'name'\n"
        "read_args({'chat_template': sys.argv[1]})"
    )
    result = run_python("-c", program, str(template))
    message = "chat_template: expected a template in Jinja, got line 1: unexpected 'end of template'"
    assert result.stderr.splitlines()[-1] == f"pagedattn_serve.errors.ArgumentError: {message}"


@pytest.mark.parametrize("modules", [SERVER, ["uvicorn"], [*HIDDEN, *SERVER]], ids=",".join)
def test_without_what_the_server_needs(modules: list[str]) -> None:
    result = run_without(modules, "serve")
    assert (result.returncode, result.stdout) == (1, "")
    names = ", ".join(sorted(modules))
    assert result.stderr == f"pagedattn: error: pagedattn_serve: expected {names}: {how_to_install()}\n"


def test_other_commands_need_nothing_of_the_server() -> None:
    assert run_without(SERVER, "info").returncode == 0


def test_help_needs_no_more_than_python() -> None:
    result = run_without([*HIDDEN, *SERVER, "torch"], "serve", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    for option in ("--api-key", "--max-waiting", "--num-blocks"):
        assert option in result.stdout
