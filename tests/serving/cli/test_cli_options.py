"""Wrong options of the `pagedattn` command: each is one line, before anything is imported or loaded."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from socket import create_server

from test_cli import DTYPES, run_without

from pagedattn_serve import DEMO_MODEL
from pagedattn_simulate.cost_model import PRESETS

# Of each subcommand: every option whose value can be judged without the model, and what the line says of it.
WRONG = {
    "generate --prompt x": [
        ("no/such/model", "MODEL: expected a directory with a config.json, got no/such/model"),
        ("{tmp}/file", "MODEL: expected a directory with a config.json, got {tmp}/file"),
        ("--dtype bf16", f"--dtype: expected auto, {DTYPES}, got bf16"),
        ("--dtype=", f"--dtype: expected auto, {DTYPES}, got an empty text"),
        ("--quantization int2", "--quantization: expected None, int8 or int4 (leave it out for a quantized"),
        ("--load-format sharded", "--load-format: expected one of auto, dummy, got 'sharded'"),
        ("--tokenizer no/such/dir", "--tokenizer: expected a directory with one of tokenizer.json, "),
        ("--tokenizer {tmp}", "--tokenizer: expected a directory with one of tokenizer.json, "),
        ("--device tpu", "--device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("--tensor-parallel-size 0", "--tensor-parallel-size: expected an int in [1, 64], got 0"),
        ("--tensor-parallel-size two", "--tensor-parallel-size: expected an int, got 'two'"),
        ("--pipeline-parallel-size 0", "--pipeline-parallel-size: expected an int in [1, 64], got 0"),
        ("--distributed-executor-backend mpi", "--distributed-executor-backend: expected one of mp, ray, got 'mpi'"),
        ("--max-model-len 1", "--max-model-len: expected an int >= 2, got 1"),
        ("--max-num-seqs 0", "--max-num-seqs: expected an int >= 1, got 0"),
        ("--max-num-seqs 1.5", "--max-num-seqs: expected an int, got '1.5'"),
        ("--max-num-batched-tokens 0", "--max-num-batched-tokens: expected an int >= 1, got 0"),
        ("--scheduling-policy lifo", "--scheduling-policy: expected one of fcfs, priority, got 'lifo'"),
        ("--preemption-mode none", "--preemption-mode: expected one of auto, recompute, swap, got 'none'"),
        ("--speculation eagle", "--speculation: expected None or \"ngram\", got 'eagle'"),
        ("--num-speculative-tokens 0", "--num-speculative-tokens: expected an int >= 1, got 0"),
        ("--max-beam-width 0", "--max-beam-width: expected an int >= 1, got 0"),
        ("--kv-cache-memory -5", "--kv-cache-memory: expected an int >= 1, got -5"),
        ("--kv-cache-memory 1GB", "--kv-cache-memory: expected bytes, or a number of KiB, MiB, GiB or TiB, got '1GB'"),
        ("--num-blocks 0", "--num-blocks: expected an int >= 1, got 0"),
        ("--num-blocks 1 --kv-cache-memory 1GiB", "--kv-cache-memory: expected None beside num_blocks, which says"),
        ("--block-size 24", "--block-size: expected a power of two, got 24"),
        ("--block-size 4 --kv-cache-dtype int8", "--block-size: expected at least 8 with kv_cache_dtype int8, got 4"),
        ("--gpu-memory-utilization 1.5", "--gpu-memory-utilization: expected a number in (0, 1], got 1.5"),
        ("--cpu-memory-utilization 0", "--cpu-memory-utilization: expected a number in (0, 1], got 0.0"),
        ("--cpu-memory-utilization 0.5 --num-blocks 8", "--cpu-memory-utilization: expected None beside kv_cache_"),
        ("--cpu-memory-utilization 0.5 --tensor-parallel-size 2", "--cpu-memory-utilization: expected None with "),
        ("--gpu-memory-utilization much", "--gpu-memory-utilization: expected a number, got 'much'"),
        ("--swap-space nan", "--swap-space: expected a finite number, got nan"),
        ("--kv-cache-dtype int4", "--kv-cache-dtype: expected auto, fp8, fp8_e4m3, fp8_e5m2, int8, got int4"),
        ("--kv-scales {tmp}/file", "--kv-scales: expected None with kv_cache_dtype auto, which takes no scales"),
        ("--kv-cache-dtype fp8 --kv-scales {tmp}/none", "--kv-scales: expected a file that can be read, got {tmp}/no"),
        ("--kv-cache-dtype fp8 --kv-scales {tmp}/file", "--kv-scales: expected JSON in {tmp}/file, got "),
        ("--kv-cache-dtype fp8 --kv-scales {tmp}/deep", "--kv-scales: expected JSON in {tmp}/deep, got lists or obj"),
        ("--prefix-cache-dir {tmp}/file", "--prefix-cache-dir: expected a directory that can be written, got {tmp}/f"),
        ("--prefix-cache-dir {tmp} --no-prefix-caching", "--prefix-cache-dir: expected None without prefix caching"),
        ("--prefix-cache-dir {tmp} --tensor-parallel-size 2", "--prefix-cache-dir: expected None with several ranks"),
        ("--prefix-cache-dir-size 0", "--prefix-cache-dir-size: expected an int >= 1, got 0"),
        ("--prefix-cache-dir-size 1GB", "--prefix-cache-dir-size: expected bytes, or a number of KiB, MiB, GiB or Ti"),
        ("--temperature -1", "--temperature: expected a number in [0, 1e+09], got -1.0"),
        ("--top-k -2", "--top-k: expected an int >= "),
        ("--top-k many", "--top-k: expected an int, got 'many'"),
        ("--top-p 0", "--top-p: expected a number in (0, 1], got 0.0"),
        ("--min-p 1.5", "--min-p: expected a number in [0, 1], got 1.5"),
        ("--seed one", "--seed: expected an int, got 'one'"),
        ("--max-tokens 0", "--max-tokens: expected an int >= 1, got 0"),
        ("--stop=", "--stop: expected non-empty strings"),
        ("--prompts-file -", "--prompts-file: not allowed with argument --prompt"),
        ("--dtpye float16", "unrecognized arguments: --dtpye"),
    ],
    "generate": [
        ("", "one of the arguments --prompt --prompts-file is required"),
        ("--prompts-file {tmp}/none", "--prompts-file: expected a file that can be read, got {tmp}/none (No such "),
        ("--prompts-file {tmp}", "--prompts-file: expected a file that can be read, got {tmp} (Is a directory)"),
        ("--prompts-file {tmp}/empty", "--prompts-file: expected a prompt a line in {tmp}/empty, got none"),
        ("--prompts-file " + os.devnull, f"--prompts-file: expected a prompt a line in {os.devnull}, got none"),
    ],
    "serve --port 0": [
        ("no/such/model", "MODEL: expected a directory with a config.json, got no/such/model"),
        ("--dtype bf16", f"--dtype: expected auto, {DTYPES}, got bf16"),
        ("--seed -1", f"--seed: expected an int in [0, {2**64 - 1}], got -1"),
        ("--no-prefix-caching=1", "--no-prefix-caching: ignored explicit argument '1'"),
        ("--host nowhere.invalid", "--host: expected a name or an address of this machine, got nowhere.invalid ("),
        ("--host a..b", "--host: expected a name or an address of this machine, got a..b ("),
        ("--host 192.0.2.1", "--host: expected a name or an address of this machine, got 192.0.2.1 (Cannot assign "),
        ("--host=", "--host: expected a text, got an empty one"),
        ("--port 65536", "--port: expected an int in [0, 65535], got 65536"),
        ("--port http", "--port: expected an int, got 'http'"),
        ("--port {taken}", "--port: expected one that is free on 127.0.0.1, got {taken} (Address already in use)"),
        ("--allowed-hosts a:80", "--allowed-hosts: expected names or addresses without scheme and port, or *, got"),
        ("--allowed-hosts a,,b", "--allowed-hosts: expected names or addresses without scheme and port, or *, got"),
        ("--uds=", "--uds: expected a text, got an empty one"),
        ("--uds {tmp}", "--uds: expected a path of at most 107 bytes where a socket can be made, got {tmp} (Addr"),
        ("--ssl-certfile {tmp}/none", "--ssl-certfile: expected a file that can be read, got {tmp}/none (No such "),
        ("--ssl-certfile {tmp}/latin", "--ssl-certfile: expected a certificate in PEM, and its private key without"),
        ("--ssl-keyfile {tmp}/latin", "--ssl-keyfile: expected none without ssl_certfile, got {tmp}/latin"),
        ("--root-path llm", "--root-path: expected a path that begins with / and ends with none, such as /llm, got '"),
        ("--allowed-origins box", "--allowed-origins: expected origins such as https://chat.example or http://localh"),
        ("--response-store-size 1GB", "--response-store-size: expected bytes, or a number of KiB, MiB, GiB or TiB, "),
        ("--response-ttl -1", "--response-ttl: expected a number "),
        ("--api-key=", "--api-key: expected a text for key 1 of 1, got an empty one"),
        ("--api-key a --api-key sécret", "--api-key: expected printable ASCII without spaces, got another character"),
        ("--prefix-cache-per-key", "--prefix-cache-per-key: expected False without API keys"),
        ("--served-model-name=", "--served-model-name: expected a text, got an empty one"),
        ("--served-model-name a {model}", "--served-model-name: expected MODEL before it, or -- before MODEL, "),
        ("--tool-call-parser hermit", "--tool-call-parser: expected one of auto, none, hermes, "),
        ("--reasoning-parser hermes", "--reasoning-parser: expected one of auto, none, qwen3, "),
        ("--chat-template {tmp}/none", "--chat-template: expected a file that can be read, got {tmp}/none (No such "),
        ("--chat-template {tmp}", "--chat-template: expected a file that can be read, got {tmp} (Is a directory)"),
        ("--chat-template {tmp}/open", "--chat-template: expected a template in Jinja, got line 1: unexpected end of "),
        ("--chat-template {tmp}/latin", "--chat-template: expected UTF-8 in {tmp}/latin, got "),
        ("--data-parallel-size 0", "--data-parallel-size: expected an int in [1, 256], got 0"),
        ("--data-parallel-size 257", "--data-parallel-size: expected an int in [1, 256], got 257"),
        ("--max-waiting 0", "--max-waiting: expected an int >= 1, got 0"),
        ("--max-body-size 1GB", "--max-body-size: expected bytes, or a number of KiB, MiB, GiB or TiB, got '1GB'"),
        ("--max-body-size 0", "--max-body-size: expected an int >= 1, got 0"),
        ("--request-timeout 0", "--request-timeout: expected a number > 0, got 0.0"),
        ("--shutdown-timeout nan", "--shutdown-timeout: expected a finite number, got nan"),
        ("--log-format xml", "--log-format: expected one of text, json, got 'xml'"),
        ("--log-level all", "--log-level: expected one of debug, info, warning, error, got 'all'"),
        ("a b", "unrecognized arguments: b"),
    ],
    "quantize --format int4": [
        ("no/such/model {tmp}/out", "MODEL: expected a directory with a config.json, got no/such/model"),
        ("{model} {tmp}", "OUT: expected a directory that is empty or does not exist, got {tmp}, which is in use"),
        ("{model} {tmp}/file", "OUT: expected a directory that is empty or does not exist, got {tmp}/file"),
        ("{model} {tmp}/none/out", "OUT: expected a directory within one that exists, got {tmp}/none/out"),
        ("{model} /proc/out", "OUT: expected a directory that can be written, got /proc/out (No such file or dir"),
        ("{model} {tmp}/out --format int2", "--format: invalid choice: 'int2' (choose from "),
        ("{model}", "the following arguments are required: OUT"),
    ],
    "verify": [
        ("no/such/model", "MODEL: expected a directory with a config.json, got no/such/model"),
        ("--dtype bf16", f"--dtype: expected auto, {DTYPES}, got bf16"),
        ("--url localhost:8000", "--url: expected one such as http://localhost:8000, got localhost:8000"),
        ("--url http://localhost:abc", "--url: expected one such as http://localhost:8000, got http://localhost:abc"),
        ("--url http://[::1", "--url: expected one such as http://localhost:8000, got http://[::1"),
        ("--url http://", "--url: expected one such as http://localhost:8000, got http://"),
        ("--url http://a\x7f", "--url: expected one such as http://localhost:8000, got http://a"),
        ("--url http://localhost --dtype float16", "--dtype: expected none with --url, as the server has its own opt"),
        ("--prompt x", "unrecognized arguments: --prompt"),
    ],
    "info": [
        ("no/such/model", "MODEL: expected a directory with a config.json, got no/such/model"),
        ("--dtype int8", f"--dtype: expected auto, {DTYPES}, got int8"),
        ("--quantization int2", "--quantization: expected None, int8 or int4 (leave it out for a quantized"),
        ("--block-size 0", "--block-size: expected an int in [1, 256], got 0"),
        ("--block-size 16.0", "--block-size: expected an int, got '16.0'"),
        ("--kv-cache-memory -5", "--kv-cache-memory: expected an int >= 1, got -5"),
        ("--kv-cache-dtype int4", "--kv-cache-dtype: expected auto, fp8, fp8_e4m3, fp8_e5m2, int8, got int4"),
        ("--prompt x", "unrecognized arguments: --prompt"),
    ],
    "simulate --hardware H100 --rate 1": [
        ("no/such/model", "MODEL: expected a directory with a config.json, got no/such/model"),
        ("--dtype bf16", f"--dtype: expected auto, {DTYPES}, got bf16"),
        ("--hardware TPU", "--hardware: expected A100-40, A100-80, H100, H200, cpu, or a JSON file, got TPU"),
        ("--hardware {tmp}", "--hardware: expected A100-40, A100-80, H100, H200, cpu, or a JSON file, got {tmp} (Is a"),
        ("--hardware {tmp}/file", "--hardware: expected A100-40, A100-80, H100, H200, cpu, or a JSON file that can be"),
        ("--hardware {tmp}/deep", "--hardware: expected A100-40, A100-80, H100, H200, cpu, or a JSON file that can be"),
        ("--hardware {tmp}/gpu", "--hardware {tmp}/gpu: link_bytes: expected a number > 0, got 0"),
        ("--tensor-parallel-size 0", "--tensor-parallel-size: expected an int in [1, 4096], got 0"),
        ("--data-parallel-size 5000", "--data-parallel-size: expected an int in [1, 4096], got 5000"),
        ("--system vllm", "--system: expected any of paged, orca-oracle, orca-pow2, orca-max, "),
        ("--price -1", "--price: expected a number >= 0, got -1.0"),
        ("--rate 0", "--rate: expected a number > 0, got 0.0"),
        ("--rate 1,x", "--rate: expected a number, got 'x'"),
        ("--rate 1e6", "--rate: expected at most 1000000 requests in 600 seconds, got 1e+06 a second"),
        ("--trace {tmp}/none", "--trace: not allowed with argument --rate"),
        ("--duration 0", "--duration: expected a number > 0, got 0.0"),
        ("--lengths none", "--lengths: expected sharegpt, alpaca, or a JSON file, got none"),
        ("--tokenizer {tmp}", "--tokenizer: expected a directory with one of tokenizer.json, "),
        ("--shared-prefix -1", "--shared-prefix: expected an int >= 0, got -1"),
        ("--n 0", "--n: expected an int >= 1, got 0"),
        ("--n 2 --beam-width 2", "--n: expected 1 with beam_width, as a beam search has one output here, got 2"),
        ("--beam-width -1", "--beam-width: expected an int >= 0, got -1"),
        ("--seed -1", "--seed: expected an int >= 0, got -1"),
        ("--max-num-seqs 0", "--max-num-seqs: expected an int >= 1, got 0"),
        ("--block-size 12", "--block-size: expected a power of two, got 12"),
        ("--kv-cache-dtype int4", "--kv-cache-dtype: expected auto, fp8, fp8_e4m3, fp8_e5m2, int8, got int4"),
        ("--json {tmp}/none/x", "--json: expected a file in a directory that exists, got {tmp}/none/x"),
    ],
    "simulate --hardware H100": [
        ("", "one of the arguments --rate --max-latency --trace is required"),
        ("--max-latency 0", "--max-latency: expected a number > 0, got 0.0"),
        ("--trace {tmp}/none", "--trace: expected a CSV file, got {tmp}/none: No such file or directory"),
        ("--trace {tmp}/file", "--trace: expected the columns arrival, prompt, output in the first line of {tmp}/file"),
    ],
    "": [
        ("", "the following arguments are required: COMMAND"),
        ("sevre", "COMMAND: invalid choice: 'sevre' (choose from "),
        ("--prompt x", "COMMAND: invalid choice: 'x' (choose from "),
    ],
}  # fmt: skip

# All in one interpreter: of each command its status, what it wrote to standard error, and what is imported by then.
REFUSED = """
import contextlib, io, json, sys
from pagedattn_serve.cli import main

results = []
for arguments in json.load(sys.stdin):
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(error):
        try:
            status = main(arguments)
        except SystemExit as exit:
            status = exit.code
    results.append((status, error.getvalue(), [name for name in ("torch", "transformers") if name in sys.modules]))
print(json.dumps(results))
"""


def test_a_wrong_option_is_one_line_before_anything_is_loaded(tmp_path: Path) -> None:
    """That names the option, what was expected and what came; status 2. Neither torch nor transformers is imported:
    the answer comes in milliseconds, and not after the ten seconds that these two take on a busy machine."""
    (tmp_path / "file").write_text("no JSON\n")
    (tmp_path / "gpu").write_text(json.dumps(dataclasses.asdict(PRESETS["H100"]) | {"link_bytes": 0}))
    (tmp_path / "deep").write_text("[" * 10**5)
    (tmp_path / "open").write_text("{{ x")
    (tmp_path / "empty").write_text(" \n\n")
    (tmp_path / "latin").write_bytes(b"{{ caf\xe9 }}")
    with create_server(("127.0.0.1", 0)) as taken:
        places = {"tmp": tmp_path, "model": DEMO_MODEL, "taken": taken.getsockname()[1]}
        cases = [
            ([*command.split(), *(word.format(**places) for word in wrong.split())], said.format(**places))
            for command, all_wrong in WRONG.items()
            for wrong, said in all_wrong
        ]
        command = [sys.executable, "-c", REFUSED]
        given = json.dumps([arguments for arguments, _ in cases])
        environment = {name: value for name, value in os.environ.items() if name != "PAGEDATTN_API_KEY"}
        done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr
    wrong = []
    for (arguments, said), (status, line, imported) in zip(cases, json.loads(done.stdout), strict=True):
        is_line = re.match(r"pagedattn( [a-z]+)?: error: ", line) and line.count("\n") == 1 and "sécret" not in line
        if not (status == 2 and is_line and said in line and imported == []):
            wrong.append((arguments, said, status, line, imported))
    assert wrong == []


def test_all_options_are_tried_with_a_wrong_value() -> None:
    """All that take a value: a new option is judged early, too."""
    tried = {word.split("=")[0] for each in WRONG for wrong, _ in WRONG[each] for word in f"{each} {wrong}".split()}
    for name in ("generate", "serve", "quantize", "simulate", "info"):
        help = run_without([], name, "--help").stdout
        flags = set(re.findall(r"^  (--[a-z-]+) [A-Z{]", help, re.MULTILINE))
        assert flags and flags - tried <= {"--prompt", "--plot"}, flags - tried
