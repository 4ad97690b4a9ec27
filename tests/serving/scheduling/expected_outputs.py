"""What a request without beam search gets from a `FakeModel`, token by token, whoever runs beside the request."""

from fake_runner import FakeModel, prompt_logprob, value_of_salt, values_after

from pagedattn_serve.outputs import Logprob
from pagedattn_serve.sampling.state import SamplingState
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.sequence import SequenceStatus


def expected_prompt_logprobs(prompt: list[int], salt: str) -> list[dict[int, Logprob] | None]:
    values = values_after(value_of_salt(salt), prompt)
    return [None, *({token: prompt_logprob(value)} for token, value in zip(prompt[1:], values, strict=False))]


def expected_outputs(
    model: FakeModel, prompt: list[int], salt: str, params: SamplingParams, max_model_len: int
) -> list[tuple[list[int], SequenceStatus]]:
    """The tokens of each output, and how they end."""
    rows = [SamplingState(params, prompt, [], index) for index in range(params.num_sequences)]
    ends = {*params.stop_ids, *(() if params.ignore_eos else (model.eos_token_id,))}
    max_tokens = min(params.max_tokens or 0, max_model_len - len(prompt))
    values = [values_after(value_of_salt(salt), prompt)[-1]] * len(rows)
    statuses = dict.fromkeys(range(len(rows)), SequenceStatus.RUNNING)
    while unfinished := [i for i, status in statuses.items() if status is SequenceStatus.RUNNING]:
        tokens = {i: model.next_token(values[i], rows[i]) for i in unfinished}
        for i, token in tokens.items():
            if None in tokens.values():
                statuses[i] = SequenceStatus.FINISHED_ERROR
                continue
            rows[i].output_token_ids.append(token)
            [values[i]] = values_after(values[i], [token])
            if token in ends:
                statuses[i] = SequenceStatus.FINISHED_STOPPED
            elif len(rows[i].output_token_ids) == max_tokens:
                statuses[i] = SequenceStatus.FINISHED_LENGTH
    outputs = [(row.output_token_ids, statuses[i]) for i, row in enumerate(rows)]
    return outputs if outputs[0][0] else outputs[:1]  # an error at the first token comes before the fork
