"""ModelRunner: the tensors of a step against loops over plain lists, and what one step does."""

from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import VOCAB_SIZE, Checkpoint, greedy_reference
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.execution.sampler import SamplerOutput
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import (
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    SequenceGroup,
    SequenceRules,
    SequenceStatus,
    TableArray,
)

GREEDY = SamplingParams(temperature=0)
MAX_LEN = 40


@pytest.fixture(scope="module")
def model(llama: Checkpoint) -> CausalLM:
    return load_model(llama.path)


def make_configs(num_blocks: int = 20, block_size: int = 8, **limits: int) -> tuple[SchedulerConfig, CacheConfig]:
    return SchedulerConfig(**{"max_model_len": MAX_LEN, **limits}), CacheConfig(
        num_blocks=num_blocks, block_size=block_size
    )


def expected_inputs(batch: ScheduledBatch, manager: BlockManager) -> dict[str, list[int]]:
    """Token by token."""
    expected: dict[str, list[int]] = {
        "token_ids": [],
        "positions": [],
        "slot_mapping": [],
        "seq_lens": [],
        "query_start_loc": [0],
        "sampling_rows": [],
    }
    for scheduled in batch.sequences:
        sequence = scheduled.sequence
        tokens = sequence.prompt_token_ids + sequence.output_token_ids
        end = sequence.num_computed_tokens + scheduled.num_new_tokens
        for position in range(sequence.num_computed_tokens, end):
            expected["token_ids"].append(tokens[position])
            expected["positions"].append(position)
            block = manager.block_table(sequence)[position // manager.block_size]
            expected["slot_mapping"].append(block * manager.block_size + position % manager.block_size)
        expected["seq_lens"].append(end)
        expected["query_start_loc"].append(len(expected["token_ids"]))
        if end == len(tokens):
            expected["sampling_rows"].append(len(expected["token_ids"]) - 1)
    return expected


def given_to_the_model(runner: ModelRunner, batch: ScheduledBatch) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The token ids, positions and metadata of a batch, without a run of the model."""
    given: list[Any] = []
    forward = mock.patch.object(runner.model, "forward", lambda *arguments: given.extend(arguments))
    with mock.patch.object(runner, "_graphs", None), forward:
        runner.run_model(runner.prepare_inputs(batch))
    token_ids, positions, _, metadata = given
    return token_ids, positions, metadata


def check_inputs(runner: ModelRunner, manager: BlockManager, batch: ScheduledBatch) -> None:
    token_ids, positions, metadata = given_to_the_model(runner, batch)
    one_token_each = torch.arange(len(batch.sequences) + 1, dtype=torch.int32)
    starts = one_token_each if metadata.query_start_loc is None else metadata.query_start_loc
    assert (metadata.query_start_loc is None) == torch.equal(starts, one_token_each)
    tensors = {
        "token_ids": token_ids,
        "positions": positions,
        "slot_mapping": metadata.slot_mappings[0],
        "seq_lens": metadata.seq_lens,
        "query_start_loc": starts,
        "sampling_rows": metadata.sampling_rows,
    }
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == expected_inputs(batch, manager)
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.int32 if name in ("seq_lens", "query_start_loc") else torch.int64)
    assert metadata.max_seq_len == max(tensors["seq_lens"].tolist())
    [block_tables] = metadata.block_tables
    assert block_tables.dtype == torch.int32
    assert block_tables.shape == (len(batch.sequences), -(-metadata.max_seq_len // manager.block_size))
    lengths = [-(-length // manager.block_size) for length in tensors["seq_lens"].tolist()]
    for row, scheduled, length in zip(block_tables.tolist(), batch.sequences, lengths, strict=True):
        assert row[:length] == manager.block_table(scheduled.sequence)[:length]
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@given(
    lengths=st.lists(st.integers(1, MAX_LEN - 1), min_size=1, max_size=9),
    block_size=st.sampled_from([8, 16]),
    num_blocks=st.integers(5, 14),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 50),
    random=st.randoms(use_true_random=False),
)
def test_inputs_of_chunks_and_decodes(
    model: CausalLM,
    lengths: list[int],
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    random: Any,
) -> None:
    """As a scheduler mixes them, with preemption, until all are done; no model runs."""
    scheduler_config, cache_config = make_configs(
        num_blocks, block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    scheduler = Scheduler(scheduler_config, cache_config)
    manager = scheduler.block_manager
    runner = ModelRunner(model, cache_config, manager.table_array, "cpu", seed=0)
    groups: dict[Sequence, SequenceGroup] = {}
    ends: dict[Sequence, int] = {}
    for i, length in enumerate(lengths):
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(length)]
        group = SequenceGroup(str(i), prompt, SequenceRules(), 0.0)
        scheduler.add(group)
        [sequence] = group.sequences
        groups[sequence] = group
        ends[sequence] = random.randint(length + 1, MAX_LEN)
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        check_inputs(runner, manager, batch)
        scheduler.mark_computed(batch)
        for scheduled in batch.sequences:
            if scheduled.num_samples:
                scheduled.sequence.output_token_ids.append(random.randrange(VOCAB_SIZE))
                if scheduled.sequence.num_tokens == ends[scheduled.sequence]:
                    scheduler.finish(groups[scheduled.sequence], scheduled.sequence, SequenceStatus.FINISHED_LENGTH)


def running(name: str, prompt: list[int]) -> Sequence:
    sequence = Sequence(name, list(prompt), status=SequenceStatus.RUNNING)
    sequence.sampling = SamplingState(GREEDY, sequence.prompt_token_ids, sequence.output_token_ids)
    return sequence


def make_runner(model: CausalLM) -> tuple[BlockManager, ModelRunner]:
    scheduler_config, cache_config = make_configs()
    manager = BlockManager(cache_config, TableArray(scheduler_config, cache_config))
    return manager, ModelRunner(model, cache_config, manager.table_array, "cpu", seed=0)


def start(manager: BlockManager, prompt: list[int]) -> Sequence:
    sequence = running("a", prompt)
    manager.allocate([sequence], keep_watermark=False)
    return sequence


def test_a_chunk_that_does_not_reach_the_end_samples_nothing(model: CausalLM, llama: Checkpoint) -> None:
    manager, runner = make_runner(model)
    long, short = start(manager, llama.prompts[5]), start(manager, llama.prompts[2])  # 33 and 7 tokens

    def execute(*chunks: tuple[Sequence, int]) -> SamplerOutput:
        batch = ScheduledBatch([ScheduledSequence(s, n, int(n == s.num_uncomputed_tokens)) for s, n in chunks])
        manager.place(batch)
        output = runner.execute(batch)
        for sequence, num_tokens in chunks:
            sequence.num_computed_tokens += num_tokens
        return output

    assert execute((long, 20)) == SamplerOutput()
    assert execute((long, 5), (short, 7)).token_ids == llama.expected[2][:1]  # one token, that of the second
    assert execute((long, 8)).token_ids == llama.expected[5][:1]


def test_blocks_are_copied_before_the_model_runs(model: CausalLM, llama: Checkpoint) -> None:
    """Two that share the blocks of a prompt go on with a different token each."""
    manager, runner = make_runner(model)
    prompt = llama.prompts[4][:12]  # the second block half full
    parent = start(manager, prompt)
    batch = ScheduledBatch([ScheduledSequence(parent, len(prompt), num_samples=1)])
    manager.place(batch)
    runner.execute(batch)
    child = running("child", prompt)
    manager.fork(parent, child)
    batch = ScheduledBatch()
    for sequence, token_id in [(child, 5), (parent, 77)]:
        sequence.num_computed_tokens = len(prompt)
        sequence.output_token_ids.append(token_id)
        batch.blocks_to_copy += manager.append(sequence)
        batch.sequences.append(ScheduledSequence(sequence, 1, num_samples=1))
    manager.place(batch)
    assert len(batch.blocks_to_copy) == 1
    assert runner.execute(batch).token_ids == [
        greedy_reference(llama.model, [*prompt, token_id], 1)[0] for token_id in (5, 77)
    ]
