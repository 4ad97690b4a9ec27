"""From hidden states to the embedding of a prompt, whose rows may come in several steps.

A mean is a sum in fp64, one row after the other, so that its bits do not depend on the steps that the rows came in.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagedattn_serve.sampling.pooling import Pooled, PoolingState
from pagedattn_serve.scheduling.sequence import ScheduledBatch

MIN_LENGTH = 1e-12  # of a vector that is normalised; torch's


def pooled_rows(batch: ScheduledBatch) -> list[tuple[int, tuple[int, int]]]:
    """The sequences, by index in the batch, with rows that are pooled, and the positions [begin, end) of these rows.
    Positions that a mean has seen before a preemption are left out."""
    found = []
    for i, scheduled in enumerate(batch.sequences[batch.num_plain :], batch.num_plain):
        sequence = scheduled.sequence
        if sequence.pooling is not None:
            begin = sequence.prompt_logits_from
            if begin is None:
                begin = len(sequence.prompt_token_ids) - 1
            begin = max(begin, sequence.num_computed_tokens)
            end = sequence.num_computed_tokens + scheduled.num_new_tokens
            if begin < end:
                found.append((i, (begin, end)))
    return found


def pool(batch: ScheduledBatch, hidden: Tensor) -> dict[int, Pooled]:
    """What the rows of a step add, for each of the sequences that are pooled, by index in the batch.

    hidden: [num_rows, hidden_size], the rows of `pooled_rows`.
    """
    pooled = {}
    for i, (begin, end) in pooled_rows(batch):
        rows = hidden[: end - begin].double().cpu().numpy()
        hidden = hidden[end - begin :]
        sequence = batch.sequences[i].sequence
        state: PoolingState = sequence.pooling
        total, embedding = rows[-1], None
        if state.pooling.mode == "mean":
            total = np.add.reduce(rows if state.total is None else np.vstack([state.total, rows]), axis=0)
        if end == len(sequence.prompt_token_ids):
            embedding = embedding_of(total, end, state)
        pooled[i] = Pooled(end, total, embedding)
    return pooled


def embedding_of(total: npt.NDArray[np.float64], num_tokens: int, state: PoolingState) -> list[float]:
    """The embedding, or the one score, rounded to fp32. total: fp64 [hidden_size], for a mean the sum of the tokens,
    else the last."""
    if state.pooling.score_weight is not None:
        score = (total * state.pooling.score_weight).sum()
        if state.pooling.squashes:
            score = (1 + np.tanh(score / 2)) / 2  # the sigmoid, which no score lets overflow
        return [float(np.float32(score))]
    vector = total / num_tokens if state.pooling.mode == "mean" else total
    vector = vector[: state.dimensions]
    if state.pooling.normalizes:
        vector = vector / max(np.sqrt(np.square(vector).sum()), MIN_LENGTH)
    embedding: list[float] = vector.astype(np.float32).tolist()
    return embedding
