"""Ranks that torchrun starts."""

from pathlib import Path

import pytest
from checkpoints import Checkpoint
from warm_python import run_python

from pagedattn_serve.distributed.torchrun import rank_of_torchrun

PROGRAM = """
import os, sys
from pagedattn_serve import LLM, SamplingParams
llm = LLM(sys.argv[1], num_blocks=40, tensor_parallel_size=2)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
[output] = llm.generate(prompt_token_ids=eval(sys.argv[2]), sampling_params=params, use_tqdm=False)
print(os.environ["RANK"], output.outputs[0].token_ids)
"""


def test_rank_0_has_the_engine(llama: Checkpoint, tmp_path: Path) -> None:
    """And the other rank serves it until it ends."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = ["--nproc-per-node", "2", program, str(llama.path), str(llama.prompts[:1])]
    done = run_python("-m", "torch.distributed.run", *arguments)
    assert (done.returncode, done.stdout) == (0, f"0 {llama.expected[0][:6]}\n"), done.stderr


def test_ranks_are_as_many_as_torchrun_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_of_torchrun(2) is None
    for name, value in dict(TORCHELASTIC_RUN_ID="none", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", RANK="3").items():
        monkeypatch.setenv(name, value)
    assert rank_of_torchrun(1) is None
    with pytest.raises(ValueError, match=r"^tensor_parallel_size: expected 4, as many as the processes .*, got 2$"):
        rank_of_torchrun(2)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size: expected 2, processes of one machine, .*, got 4$"):
        rank_of_torchrun(4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert rank_of_torchrun(4) == 3
