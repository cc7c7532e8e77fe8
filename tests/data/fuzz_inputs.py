"""Damaged inputs: files and templates with changed bytes or values.

    python tests/data/fuzz_inputs.py COUNT SEED [KIND ...]

A job's code reads each case: it opens the source, tokenises every document and packs it into blocks. This must end in
blocks or in one error with exit code 2, within 10 s of CPU time and 2 GiB, without ending the process.
"""

import faulthandler
import gzip
import io
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

SECONDS, GIB = 10, 2
HANG_S = 120  # other work may use the machine
MAX_BLOCKS = 100  # a template may write many megabytes
_ASSETS = Path(__file__).parents[2] / "pipeline" / "assets" / "tiny-qwen2"


# The inputs.

_TEXTS = [f"w{i} w{i + 1} text number {i} é 日本" for i in range(40)]
_CHOICES = {"text": ["x", "y"], "label": ["A", "B"]}
_ROWS = [{"id": f"d{i}", "text": text, "n": i, "choices": _CHOICES} for i, text in enumerate(_TEXTS)]
_GRID = {"input": [[0, 1], [2, 3]], "output": [[3, 2], [1, 0]]}
_TASK = {"train": [_GRID, _GRID], "test": [_GRID]}
_CONFIG = {
    "bos_token": "w0",
    "eos_token": {"content": "w1", "lstrip": False},
    "added_tokens_decoder": {"0": {"content": "w0", "special": True}, "1000": {"content": "<x>"}},
    "extra_special_tokens": ["<y>"],
    "split_special_tokens": False,
    "add_bos_token": True,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": "<{{ messages[0].content }}>",
}
_CHAT = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if message.role == "user" and message.content is string and not message.content.startswith('<') %}
{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if tools %}{{ raise_exception('no tools') }}{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_TEXT_TEMPLATE = """Question: {{ text }}
{% for choice in choices.text %}
{{ choices.label[loop.index0] }}. {{ choice | upper }}
{% endfor %}
{% if n > 3 %}{{ '%03d' % n }}{{ n * 2 ~ '/' ~ n }}{% else %}{{ choices | tojson(indent=2) }}{% endif %}"""


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    columns = {"text": _TEXTS, "id": [f"d{i}" for i in range(40)], "url": ["u"] * 40, "score": [0.5] * 40}
    pq.write_table(pa.table(columns), sink, row_group_size=9)
    return sink.getvalue()


def _json_lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _tokenizer() -> bytes:
    from material import word_library_tokenizer

    return word_library_tokenizer(bos=True).to_str().encode()


SEEDS: dict[str, Callable[[], bytes]] = {
    "parquet": _parquet,
    "hf.parquet": _parquet,
    "hf.jsonl": lambda: _json_lines(_ROWS),
    "hf.jsonl.gz": lambda: gzip.compress(_json_lines(_ROWS), mtime=0),
    "hf.json": lambda: json.dumps(_ROWS).encode(),
    "hf.csv": lambda: b"text,id\n" + "".join(f'"{t}",{i}\n' for i, t in enumerate(_TEXTS)).encode(),
    "arc.json": lambda: json.dumps({f"t{i}": _TASK for i in range(5)}).encode(),
    "arc.jsonl": lambda: _json_lines([_TASK | {"id": f"t{i}"} for i in range(5)]),
    "tokenizer.json": _tokenizer,
    "bundled tokenizer.json": lambda: (_ASSETS / "tokenizer.json").read_bytes(),
    "tokenizer_config.json": lambda: json.dumps(_CONFIG).encode(),
    "chat_template.jinja": _CHAT.encode,
    "text template": _TEXT_TEMPLATE.encode,
}


def changed(kind: str, rng: random.Random) -> bytes:
    """The changed file or template of a case."""
    from tests.damaging import damaged_bytes, damaged_value, to_json

    content = SEEDS[kind]()
    if not kind.endswith((".json", ".jsonl")) or rng.random() < 0.3:
        return damaged_bytes(content, rng)
    lines = content.splitlines() if kind.endswith(".jsonl") else [content]
    at = rng.randrange(len(lines))
    lines[at] = to_json(damaged_value(json.loads(lines[at]), rng), rng)
    return b"\n".join(lines)


def read(kind: str, content: bytes, folder: Path, rng: random.Random) -> None:
    """Reads the case as a job does. Raises what the job raises."""
    from material import text_stream, word_tokenizer

    from pipeline.config.choices import OnError, SpecialTokens
    from pipeline.config.schema import ArcData, HfData, ParquetData
    from pipeline.data.sources import ChatSource, open_source
    from pipeline.data.text.tokenizer import load_tokenizer

    on_error = rng.choice(list(OnError))
    is_chat = kind in ("tokenizer_config.json", "chat_template.jinja")
    tokenizer = word_tokenizer()
    file = folder / f"changed.{kind.partition('.')[2]}"
    file.write_bytes(content)
    (folder / "good.parquet").write_bytes(_parquet())
    config = ParquetData(source="parquet", path=str(folder / "good.parquet"), on_error=on_error)
    if "token" in kind or is_chat:
        (folder / "tokenizer.json").write_bytes(_tokenizer())
        (folder / kind.rpartition(" ")[2]).write_bytes(content)
        special = SpecialTokens.none if is_chat else rng.choice(list(SpecialTokens))
        tokenizer = load_tokenizer(str(folder), special_tokens=special)
    elif kind == "parquet":
        groups = rng.choice([None, 1, 2])
        config = ParquetData(source="parquet", path=str(file), on_error=on_error, row_groups_per_shard=groups)
    elif kind.startswith("hf."):
        loader = {"hf.parquet": "parquet", "hf.csv": "csv"}.get(kind, "json")
        settings = {"id_column": rng.choice([None, "id"]), "info_columns": rng.choice([[], ["text"]])}
        config = HfData(source="hf", path=loader, data_files=str(file), on_error=on_error, **settings)
    elif kind.startswith("arc."):
        config = ArcData(source="arc", path=str(file), on_error=on_error, augmentations=2)
    elif kind == "text template":
        jsonl = folder / "rows.jsonl"
        jsonl.write_bytes(_json_lines([*_ROWS[:6], {"id": "e", "text": "", "n": 0, "choices": {"text": []}}]))
        template = content.decode(errors="surrogateescape")
        config = HfData(source="hf", path="json", data_files=str(jsonl), text=template, on_error=on_error)
    source = open_source(config, tokenizer)
    if is_chat:
        source = ChatSource(source, tokenizer, on_error)
    source.fingerprint()
    settings = {"num_streams": 2, "rows_per_block": 4, "length": 16, "on_error": on_error}
    for number in range(2):
        for block in islice(text_stream(source, tokenizer, stream=number, **settings).blocks(), MAX_BLOCKS):
            record = [[skip.source, skip.index, skip.reason] for skip in block.skipped]
            json.dumps([record, block.table.to_pydict()], ensure_ascii=False, default=str).encode()


def problem(seed: int, number: int, kind: str, outcomes: Counter) -> str:
    """What is wrong with a case's outcome; "" if nothing is. Counts the outcomes."""
    from pipeline.core.errors import EXIT_INVALID, PipelineError
    from pipeline.job.metrics import peak_rss_mib

    rng = random.Random(f"{seed}/{kind}/{number}")
    content, wrong = changed(kind, rng), ""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            read(kind, content, Path(folder), rng)
            outcomes["read"] += 1
        except PipelineError as error:
            outcomes[error.exit_code] += 1
            wrong = "" if error.exit_code == EXIT_INVALID else f"{type(error).__name__}: {error}"
        except BaseException:
            wrong = traceback.format_exc()
    seconds, gib = time.process_time() - began, peak_rss_mib() / 1024
    return wrong or f"{seconds:.0f} s, {gib:.1f} GiB" * (seconds > SECONDS or gib > GIB)


def main(count: int, seed: int, kinds: list[str]) -> int:
    """Runs the cases, one of each kind in turn, and prints problems."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # a bomb raises MemoryError
    outcomes, problems = Counter(), 0
    for number in range(count):
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        if wrong := problem(seed, number, kind := kinds[number % len(kinds)], outcomes):
            problems += 1
            print(f"case {number}, {kind}: {wrong}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"{count} cases: {dict(outcomes)}; {problems} problems")
    return problems > 0 or len(outcomes) < 2


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(SEEDS)))
