"""Writes the inputs of all extractors: checkpoints with published shapes and random weights, and the texts.

    python -m scripts.bench.peers.prepare DEMO_TEXT TOKENIZER WORKLOAD...

Long documents are cut to whole rows, so that joining them and keeping them apart gives the same rows.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig, Qwen2Config

from scripts.bench.peers.workload import WORKLOADS, Workload
from scripts.bench.published_shapes import SHAPES

SHORTEST, LONGEST = 20, 250

CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(n_ctx=1024),  # as published; transformers itself no longer writes it
    "Qwen/Qwen2.5-0.5B": Qwen2Config(**SHAPES["Qwen2.5-0.5B"], tie_word_embeddings=True),
}


def write_checkpoint(directory: Path, config: PretrainedConfig, tokenizer: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)


def documents(texts: list[str], tokenizer: Tokenizer, workload: Workload) -> Iterator[tuple[str, int]]:
    """Texts and their numbers of tokens: short documents unchanged, long ones cut to whole rows."""
    left = workload.num_tokens
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        if left <= 0:
            return
        size = len(encoding)
        if workload.short_documents:
            is_fit = SHORTEST <= size <= LONGEST
        else:
            size = min(size, left) // workload.length * workload.length
            text = text[: encoding.offsets[size - 1][1]] if size else ""
            is_fit = size and len(tokenizer.encode(text)) == size  # a cut inside a word could change its tokens
        if is_fit:
            left -= size
            yield text, size


def write_text(directory: Path, texts: list[str], tokenizer: Tokenizer, workload: Workload) -> None:
    chosen = list(documents(texts, tokenizer, workload))
    columns = {
        "text": [text for text, _ in chosen],
        "id": [str(number) for number in range(len(chosen))],
        "n_tokens": [size for _, size in chosen],
    }
    directory.mkdir(parents=True)
    pq.write_table(pa.table(columns), directory / "0.parquet")


def main() -> None:
    demo_text, assets, *names = sys.argv[1:]
    tokenizer = Tokenizer.from_file(f"{assets}/tokenizer.json")
    files = sorted(Path(demo_text).glob("*.parquet"))
    texts = [text for file in files for text in pq.read_table(file)["text"].to_pylist()]
    for workload in (WORKLOADS[name] for name in names):
        if not workload.checkpoint.exists():
            write_checkpoint(workload.checkpoint, CONFIGS[workload.model], Path(assets))
        shutil.rmtree(workload.directory, ignore_errors=True)
        write_text(workload.directory, texts, tokenizer, workload)


if __name__ == "__main__":
    main()
