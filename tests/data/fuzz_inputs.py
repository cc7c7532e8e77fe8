"""Damaged inputs: files with changed bytes or values, and random templates.

    python tests/data/fuzz_inputs.py --count 1000 [--seed 0] [--kind parquet] [--case 17]

A job's code reads each case: it opens the source, tokenises every document and packs it into blocks. This must end in
blocks or in one error with exit code 2, within 10 s of CPU time and 2 GiB, without ending the process. Templates must
give the same text in two processes with different hash seeds.
"""

import argparse
import gzip
import hashlib
import json
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

SECONDS, GIB = 10, 2
HANG_S = 120  # other work may use the machine
_ASSETS = Path(__file__).parents[2] / "pipeline" / "assets" / "tiny-qwen2"


class Case(NamedTuple):
    number: int
    kind: str
    outcome: str  # what was read, or the error; not starting with a colon
    digest: str
    code: int | None  # of the error
    seconds: float
    gib: float
    is_wrong: bool


# The inputs.

_TEXTS = [f"w{i} w{i + 1} text number {i} é 日本" for i in range(40)]
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
_CHAT = """{%- if tools %}{{ raise_exception('no tools') }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if message.role == "user" and message.content is string and not message.content.startswith('<') %}
{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_TEXT_TEMPLATE = """Question: {{ text }}
{% for choice in choices.text %}
{{ choices.label[loop.index0] }}. {{ choice | upper }}
{% endfor %}
{% if n > 3 %}{{ '%03d' % n }}{{ n * 2 ~ '/' ~ n }}{% else %}{{ choices | tojson(indent=2) }}{% endif %}"""


def _rows() -> list[dict]:
    choices = {"text": ["x", "y"], "label": ["A", "B"]}
    return [{"id": f"d{i}", "text": text, "n": i, "choices": choices} for i, text in enumerate(_TEXTS)]


def _parquet() -> bytes:
    import io

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
    "hf.jsonl": lambda: _json_lines(_rows()),
    "hf.jsonl.gz": lambda: gzip.compress(_json_lines(_rows()), mtime=0),
    "hf.json": lambda: json.dumps(_rows()).encode(),
    "hf.csv": lambda: b"text,id\n" + "".join(f'"{t}",{i}\n' for i, t in enumerate(_TEXTS)).encode(),
    "arc.json": lambda: json.dumps({f"t{i}": _TASK for i in range(5)}).encode(),
    "arc.jsonl": lambda: _json_lines([_TASK | {"id": f"t{i}"} for i in range(5)]),
    "tokenizer.json": _tokenizer,
    "bundled tokenizer.json": lambda: (_ASSETS / "tokenizer.json").read_bytes(),
    "tokenizer_config.json": lambda: json.dumps(_CONFIG).encode(),
    "chat_template.jinja": _CHAT.encode,
    "text template": _TEXT_TEMPLATE.encode,
    "random chat template": lambda: b"",
    "random text template": lambda: b"",
}


# The damage.

_ODD_BYTES = [b"\x00", b"\xff", b"\xed\xa0\x80", b"\n", b'"', b"{", b"[" * 5000, b'{"a":' * 3000, b"1e999", b"9" * 5000]
_ODD_VALUES = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**30, 0.5, float("nan"), float("inf"), 1e308, "", "\ud800", "a\x00b"),
    *("é" * 1000, [], {}, [[]], [{}], {"": None}, [None], [[[[[[]]]]]], "{{ range(9)|random }}", "x" * 100_000),
]


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """The content after one to four changes."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, other = (rng.randrange(len(data) + 1) for _ in range(2))
        first, last = sorted((at, min(other, at + rng.choice([1, 4, 64, 4096]))))
        match rng.choice(["flip", "set", "cut", "delete", "double", "insert", "swap", "number"]):
            case "flip" if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case "set" if at < len(data):
                data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            case "cut":
                del data[at:]
            case "delete":
                del data[first:last]
            case "double":
                data[at:at] = data[first:last] * rng.choice([1, 2, 50])
            case "insert":
                data[at:at] = rng.choice([*_ODD_BYTES, rng.randbytes(rng.randint(1, 30))])
            case "swap":
                data[at : at + 8], data[other : other + 8] = data[other : other + 8], data[at : at + 8]
            case "number":  # lengths and offsets of binary formats
                data[at : at + 4] = rng.choice([0, 1, 2**31 - 1, 2**32 - 1, rng.getrandbits(32)]).to_bytes(4, "little")
    return bytes(data)


def changed_json(value: object, rng: random.Random) -> object:
    """The value with one to three of its parts replaced, removed, renamed or nested deeply."""
    root = {"": json.loads(json.dumps(value))}
    for _ in range(rng.randint(1, 3)):
        parent, key = _place(root, rng)
        match rng.choice(["replace", "remove", "nest", "rename"]):
            case "replace":
                parent[key] = rng.choice(_ODD_VALUES)
            case "remove" if parent is not root:
                del parent[key]
            case "nest":
                for _ in range(rng.choice([1, 2, 300, 2000])):
                    parent[key] = [parent[key]]
            case "rename" if isinstance(parent, dict) and parent is not root:
                parent[rng.choice(["", "\ud800", "name", "x" * 1000])] = parent.pop(key)
    return root[""]


def _place(root: dict, rng: random.Random) -> tuple[dict | list, object]:
    """A container in the tree and a key of it, found by random steps so that a large vocabulary does not dominate."""
    parent, key = root, ""
    while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.8:
        parent = parent[key]
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    return parent, key


def _dumped(value: object) -> bytes:
    """JSON of any depth, which may contain lone surrogates."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(30_000)
    try:
        return json.dumps(value, ensure_ascii=True).encode()
    except RecursionError:  # Python 3.12: the encoder in C has a limit of its own
        return "".join(json.JSONEncoder().iterencode(value)).encode()
    finally:
        sys.setrecursionlimit(limit)


_ATOMS = [
    *("text", "n", "choices", "messages", "messages[0].content", "bos_token", "nothing", "'ab'", "''", "0", "3", "-1"),
    *("none", "true", "[1, 2, 3]", "{'a': 1}", "ns.x", "i", "loop", "range(5)"),
    *("namespace(x=1)", "cycler(1, 2)", "text.upper", "lipsum", "strftime_now", "choices.keys()", "self", "dict"),
    *("text.__class__", "f(2)", "caller", "'%5000d'", "'{:>9}{}'", "when"),
]
_FILTERS = [
    *("abs", "batch(3)", "center(n)", "default('x')", "dictsort", "e", "first", "float"),
    *("format(n)", "groupby('x')", "indent(3)", "int", "items", "join(',')", "join(text)", "last"),
    *("length", "list", "lower", "map('upper')", "map('random')", "max", "min", "pprint", "random", "reject('odd')"),
    *("replace('', text)", "replace('a', 'bb')", "reverse", "round(2)", "slice(2)"),
    *("sort", "string", "sum", "title", "tojson", "tojson(indent=4)", "trim", "truncate(5)"),
    *("unique", "upper", "urlencode", "wordcount", "wordwrap(2)", "xmlattr", "urlize", "attr('x')"),
    *("map(attribute='x')", "select", "selectattr('x')", "striptags"),
]
_METHODS = [
    *("upper()", "join(choices)", "replace('', text)", "split()", "format(n)", "format(text, text)"),
    *("items()", "keys()", "now()", "isoformat()", "strftime('%c')", "x", "a"),
    *("encode()", "index", "count('a')", "append(1)", "translate({97: text})", "__init__"),
]


def random_template(rng: random.Random) -> str:
    """Random statements and expressions, mostly invalid."""

    def expression(depth: int) -> str:
        if depth <= 0 or rng.random() < 0.2:
            return rng.choice(_ATOMS)
        left = expression(depth - 1)
        match rng.randrange(8):
            case 0 | 1:
                operator = rng.choice(["+", "-", "*", "/", "//", "%", "~", "~", "==", "<", "in"])
                return f"({left} {operator} {expression(depth - 1)})"
            case 2 | 3:
                return f"({left})|{rng.choice(_FILTERS)}"
            case 4:
                return f"({left}).{rng.choice(_METHODS)}"
            case 5:
                return f"({left})[{rng.choice(['0', '-1', '1:', '::-1', expression(depth - 1)])}]"
            case 6:
                return f"[{left}, {expression(depth - 1)}]"
        test = rng.choice(["defined", "string", "none", "odd", "in [1]"])
        return f"({left} if {left} is {test} else {expression(depth - 1)})"

    def statement(depth: int) -> str:
        body = "".join(statement(depth - 1) for _ in range(rng.randint(1, 2))) if depth > 0 else "x"
        match rng.randrange(12) if depth > 0 else 0:
            case 0 | 1 | 2 | 3:
                return f"{{{{ {expression(rng.randint(0, 4))} }}}}"
            case 4 | 5:
                recursive = rng.choice(["", "", " recursive"])
                return f"{{% for i in {expression(1)}{recursive} %}}{body}{{% endfor %}}"
            case 6:
                return f"{{% if {expression(2)} %}}{body}{{% else %}}y{{% endif %}}"
            case 7:
                return f"{{% set ns.x = {rng.choice(['[ns.x]', expression(2)])} %}}"
            case 8:
                return f"{{% set z %}}{body}{{% endset %}}{{{{ z }}}}"
            case 9:
                return f"{{% macro f(k) %}}{body}{{{{ f(k - 1) if k > {rng.randint(-5, 2)} }}}}{{% endmacro %}}"
            case 10:
                return f"{{% filter {rng.choice(_FILTERS)} %}}{body}{{% endfilter %}}"
        return rng.choice(["{% include 'x' %}", "{% block b %}{{ self.b() }}{% endblock %}", "{% break %}", "{{", body])

    start = rng.choice(["", "{% set ns = namespace(x=text) %}", "{% set ns = namespace(x='a') %}"])
    loop = rng.choice(["{}", "{}", "{{% for i in range(100) %}}{}{{% endfor %}}"])
    return start + loop.format("".join(statement(2) for _ in range(rng.randint(1, 3))))


def changed(kind: str, rng: random.Random) -> bytes:
    """The changed file or template of a case."""
    content = SEEDS[kind]()
    if kind.startswith("random"):
        return random_template(rng).encode()
    is_json = kind.endswith((".json", ".jsonl"))
    if not is_json or rng.random() < 0.3:
        return changed_bytes(content, rng)
    if kind.endswith(".json"):
        return _dumped(changed_json(json.loads(content), rng))
    lines = [json.loads(line) for line in content.splitlines()]
    at = rng.randrange(len(lines))
    lines[at] = changed_json(lines[at], rng)
    return b"\n".join(map(_dumped, lines))


# Reading.


def read(kind: str, content: bytes, folder: Path, rng: random.Random) -> str:
    """Reads the case as a job does. Returns everything read as text. Raises what the job raises."""
    from material import text_stream, word_tokenizer

    from pipeline.config.choices import OnError, SpecialTokens, Template
    from pipeline.config.schema import ArcData, HfData, ParquetData
    from pipeline.data.sources import open_source
    from pipeline.data.text.chat import ChatSource
    from pipeline.data.text.templates import ChatTemplate
    from pipeline.data.text.tokenizer import TextTokenizer, load_tokenizer

    on_error = rng.choice(list(OnError))
    is_chat = "chat" in kind or kind == "tokenizer_config.json"
    tokenizer = word_tokenizer()
    texts = ParquetData(source="parquet", path=str(folder / "good.parquet"), on_error=on_error)
    (folder / "good.parquet").write_bytes(_parquet())
    if kind in ("tokenizer.json", "bundled tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "tokenizer.json").write_bytes(_tokenizer())
        (folder / kind.rpartition(" ")[2]).write_bytes(content)
        special = SpecialTokens.none if is_chat else rng.choice(list(SpecialTokens))
        tokenizer = load_tokenizer(str(folder), special_tokens=special)
    elif kind == "random chat template":
        tokenizer = TextTokenizer(
            tokenizer._tokenizer,
            name="words",
            digest="0",
            chat=ChatTemplate(content.decode(), "words", named_tokens={"bos_token": "w0"}),
            special_tokens=SpecialTokens.none,
        )
    file = folder / f"changed.{kind.partition('.')[2]}"
    file.write_bytes(content)
    config = texts
    if kind == "parquet":
        groups = rng.choice([None, 1, 2])
        config = ParquetData(source="parquet", path=str(file), on_error=on_error, row_groups_per_shard=groups)
    elif kind.startswith("hf."):
        loader = {"hf.parquet": "parquet", "hf.csv": "csv"}.get(kind, "json")
        settings = {"id_column": rng.choice([None, "id"]), "info_columns": rng.choice([[], ["text"]])}
        config = HfData(source="hf", path=loader, data_files=str(file), on_error=on_error, **settings)
    elif kind.startswith("arc."):
        template = rng.choice(list(Template)) if tokenizer._chat else Template.plain
        config = ArcData(source="arc", path=str(file), on_error=on_error, template=template, augmentations=2)
    elif kind.endswith("text template"):
        rows = [*_rows()[:6], {"id": "e", "text": "", "n": 0, "choices": {"text": [], "label": []}}]
        jsonl = folder / "rows.jsonl"
        jsonl.write_bytes(_json_lines(rows))
        template = content.decode(errors="surrogateescape")
        config = HfData(source="hf", path="json", data_files=str(jsonl), text=template, on_error=on_error)
    source = open_source(config, tokenizer)
    if is_chat:
        source = ChatSource(source, tokenizer, on_error)
    source.fingerprint()
    found = []
    for number in range(2):
        stream = text_stream(
            source, tokenizer, stream=number, num_streams=2, rows_per_block=4, length=16, on_error=on_error
        )
        for block in stream.blocks():
            record = [[skip.source, skip.index, skip.reason] for skip in block.skipped]
            json.dumps(record, ensure_ascii=False).encode()  # as in a commit record
            found.append(json.dumps([block.tokens.tolist(), block.table.to_pydict(), record], default=str))
    return "".join(found)


def run_case(seed: int, number: int, kind: str) -> dict[str, object]:
    """Runs in the worker."""
    from pipeline.core.errors import PipelineError
    from pipeline.job.metrics import peak_rss_mib

    rng = random.Random(f"{seed}/{kind}/{number}")
    content = changed(kind, rng)
    code, wrong = None, False
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = read(kind, content, Path(folder), rng)
            outcome = "read"
        except PipelineError as error:
            code, found = error.exit_code, str(error).replace(folder, "")
            outcome = f"{type(error).__name__}: {found}"
            wrong = code != 2
        except BaseException:
            outcome = found = traceback.format_exc()
            wrong = True
    gib = peak_rss_mib() / 1024
    digest = hashlib.sha256(found.encode(errors="backslashreplace")).hexdigest()
    return {"outcome": outcome, "digest": digest, "code": code, "gib": gib, "is_wrong": wrong}


# The processes.


class Worker:
    """A process that reads cases, and is restarted if a case ends it."""

    def __init__(self, hash_seed: int) -> None:
        self._hash_seed = hash_seed
        self._process: subprocess.Popen | None = None

    def run(self, seed: int, number: int, kind: str) -> dict[str, object] | None:
        """The answer, or None if the case hangs or has ended the process."""
        process = self._process or self._start()
        process.stdin.write(json.dumps([seed, number, kind]).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], HANG_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            self.close()
            return None
        answer = json.loads(line)
        if answer["gib"] > 0.75 * GIB:
            self.close()  # the peak is the process's: the next case gets a new one
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen:
        environment = os.environ | {"PYTHONHASHSEED": str(self._hash_seed), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        self._process.stdout.readline()  # written after its imports
        return self._process


def run(count: int, seed: int, kinds: list[str], first: int = 0) -> Iterator[Case]:
    """Runs the cases from number `first` on, one of each kind in turn."""
    workers = [Worker(1), Worker(2)]
    try:
        for number in range(first, first + count):
            kind = kinds[number % len(kinds)]
            answer = workers[0].run(seed, number, kind)
            if answer is None:
                yield Case(number, kind, "hangs or ends its process", "", None, 0, 0, True)
                continue
            if "template" in kind:
                again = workers[1].run(seed, number, kind)
                if again is None or again["digest"] != answer["digest"]:
                    answer |= {"is_wrong": True, "outcome": f"differs in another process: {answer['outcome']}"}
            wrong = answer.pop("is_wrong") or answer["gib"] > GIB or answer["seconds"] > SECONDS
            yield Case(number, kind, is_wrong=wrong, **answer)
    finally:
        for worker in workers:
            worker.close()


def _work() -> None:
    import datasets
    import material  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import pipeline.data.hf  # noqa: F401

    datasets.disable_progress_bars()
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # a bomb raises MemoryError
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for output of libraries
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        began = time.process_time()
        answer = run_case(*json.loads(line))
        print(json.dumps(answer | {"seconds": time.process_time() - began}), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=SEEDS, action="append")
    parser.add_argument("--case", type=int, help="only this one, with its content")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return _work()
    kinds = arguments.kind or list(SEEDS)
    if arguments.case is not None:
        kind = kinds[arguments.case % len(kinds)]
        print(kind, changed(kind, random.Random(f"{arguments.seed}/{kind}/{arguments.case}"))[:3000])
        kinds, arguments.count = [kind], 1
    counts, slowest, largest = Counter(), 0.0, 0.0
    for case in run(arguments.count, arguments.seed, kinds, arguments.case or 0):
        counts[case.kind, "WRONG" if case.is_wrong else "read" if case.code is None else "code 2"] += 1
        slowest, largest = max(slowest, case.seconds), max(largest, case.gib)
        if case.is_wrong or arguments.case is not None:
            print(
                f"case {case.number}, {case.kind}, {case.seconds:.1f} s, {case.gib:.2f} GiB: {case.outcome}\n",
                flush=True,
            )
    for kind in kinds:
        print(f"{kind:24}", {name: number for (of, name), number in sorted(counts.items()) if of == kind})
    print(f"{sum(counts.values())} cases, slowest {slowest:.1f} s, most memory {largest:.2f} GiB")
    sys.exit(any(name == "WRONG" for _, name in counts))


if __name__ == "__main__":
    main()
