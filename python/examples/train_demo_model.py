"""Train the demo model: a small LLaMA on the Python language reference that ships with CPython.

Usage: python python/examples/train_demo_model.py [--output DIR] [--steps N] [--threads N]

The text is `pydoc_data.topics` (465 KB in CPython 3.11, PSF licence). The result is a Hugging Face directory:
3.5 million parameters in bf16 (7 MB) and a byte-level BPE tokenizer of 2,048 pieces. On two cores it takes
about 24 minutes; the same CPython and library versions give the same text, tokens and batches.
"""

import argparse
import json
import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

DEMO_MODEL = Path(__file__).resolve().parents[1] / "pagedattn_serve" / "demo_model"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
CONTEXT = 512
BATCH_SIZE = 8
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
PROGRESS_EVERY = 50
# The model knows no roles: each message is a paragraph, and the answer is the next one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role: expected system, user or assistant, got ' + message.role) }}"
    "{% endif %}"
    "{{ message.content }}{% if add_generation_prompt or not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% endfor %}"
)


def train_tokenizer(documents: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, output: Path) -> None:
    tokenizer.save(str(output / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_model(end_of_text_id: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=end_of_text_id,
            eos_token_id=end_of_text_id,
        )
    )


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def train(model: LlamaForCausalLM, tokens: torch.Tensor, num_steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    started = time.monotonic()
    for step in range(num_steps):
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH_SIZE, 1), generator=generator)
        windows = tokens[starts + torch.arange(CONTEXT + 1)]  # [BATCH_SIZE, CONTEXT + 1]
        logits = model(windows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % PROGRESS_EVERY == 0 or step == num_steps - 1:
            seconds = time.monotonic() - started
            print(f"step {step:5d}/{num_steps}  loss {loss.item():.3f}  {seconds:6.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEMO_MODEL, help="directory to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    documents = [text.strip() + "\n" for text in topics.values()]
    tokenizer = train_tokenizer(documents)
    tokens = torch.tensor(tokenizer.encode(END_OF_TEXT.join(["", *documents, ""])).ids)
    model = make_model(tokenizer.token_to_id(END_OF_TEXT))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{len(documents)} documents, {len(tokens)} tokens, {millions:.2f} million parameters", flush=True)

    train(model, tokens, args.steps)
    model.to(torch.bfloat16).save_pretrained(args.output)
    save_tokenizer(tokenizer, args.output)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
