"""The arguments of an application: what `serve run` and YAML give becomes EngineArgs and ServerConfig."""

import asyncio
from types import SimpleNamespace

import pytest

from pagedattn_serve import DEMO_MODEL, EngineArgs, ray_serve
from pagedattn_serve.ray_serve import Replica, app, read_args
from pagedattn_serve.server.http.config import ServerConfig


def test_texts() -> None:
    given = {"model": "some/where", "max_num_seqs": "8", "kv_cache_memory": "2MiB", "swap_space": "0.5"}
    given |= {"enforce_eager": "true", "seed": "null", "dtype": "float32", "api_keys": "a,b", "served_model_name": "7"}
    engine_args, config = read_args(given)
    assert (engine_args.model, engine_args.max_num_seqs, engine_args.kv_cache_memory) == ("some/where", 8, 2 << 20)
    assert (engine_args.swap_space, engine_args.enforce_eager, engine_args.seed) == (0.5, True, None)
    assert (engine_args.dtype, config.api_keys, config.served_model_name) == ("float32", ("a", "b"), "7")


def test_values_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDATTN_API_KEY", "secret")
    engine_args, config = read_args({"num_blocks": 64, "allowed_hosts": ["a.example"]})
    assert (engine_args.model, engine_args.num_blocks, engine_args.dtype) == (DEMO_MODEL, 64, "auto")
    assert (config.served_model_name, config.api_keys, config.allowed_hosts) == (
        "demo_model",
        ("secret",),
        ("a.example",),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_bloks": "1"},
            "args: expected options of EngineArgs and ServerConfig that .*, got num_bloks",
        ),
        ({"port": "80"}, "that Ray Serve has not, got port"),
        ({"distributed_executor_backend": "ray"}, "got distributed_executor_backend"),
        ({"num_blocks": "many"}, "num_blocks: expected an"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory: expected bytes"),
        ({"max_num_seqs": 0}, "max_num_seqs: expected"),
        ({"chat_template": __file__ + ".none"}, "No such file"),
    ],
)
def test_mistakes(given: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        app(given)


def test_options_of_ray_serve() -> None:
    """A CPU for each rank. Requests beyond those that a replica runs wait where another replica can still take them."""
    given = {"max_num_seqs": 8, "max_waiting": 5, "shutdown_timeout": 7, "tensor_parallel_size": 2}
    bound = app({**given, "data_parallel_size": 3})._bound_deployment
    assert bound.ray_actor_options == {"num_cpus": 6}
    assert (bound.max_ongoing_requests, bound.max_queued_requests) == (24, 5)
    assert bound._deployment_config.graceful_shutdown_timeout_s == 7


def test_replicas_draw_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that Ray gives to a replica is in the seed of its engine. All else is as given."""

    class Stop(Exception):
        pass

    def make_engine(args: EngineArgs, config: ServerConfig) -> None:
        made.append(args)
        raise Stop

    made: list[EngineArgs] = []
    monkeypatch.setattr(ray_serve, "make_engine", make_engine)
    for name in ("a1", "b2", "a1"):
        monkeypatch.setattr(ray_serve.serve, "get_replica_context", lambda name=name: SimpleNamespace(replica_tag=name))
        with pytest.raises(Stop):
            asyncio.run(Replica.__init__(object.__new__(Replica), *read_args({})))
    given, _ = read_args({})
    assert made[0] == made[2] and len({given.seed, made[0].seed, made[1].seed}) == 3
    assert all(vars(each) | {"seed": given.seed} == vars(given) for each in made)
