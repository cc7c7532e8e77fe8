"""Gives odd values to every key of the configuration's schema. Each case must end in a plan or in one clear error.

    HF_HUB_OFFLINE=1 python -m tests.config.fuzz_config --cases 1000 --seed 0

A case is one to three overrides of a small real job, planned as by `python -m pipeline.plan`; some jobs are run, too.
An error must be a PipelineError with a short message and exit code 2, or 1 if a value names something remote. The keys
are read from the schema, so new keys are covered.

A case must not take more than 10 s of CPU time, nor the process more than 2 GiB. If a case takes 60 s, the program ends
with a traceback of every thread.
"""

import argparse
import contextlib
import faulthandler
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from pipeline.cli import main as command_line
from pipeline.config import composing
from pipeline.config.schema import ArcData, GenerateData, HfData, ParquetData, RunConfig
from pipeline.core.errors import EXIT_INVALID, PipelineError
from pipeline.core.messages import shortened
from pipeline.job.metrics import peak_rss_mib
from pipeline.job.opening import open_job
from pipeline.job.running import run
from pipeline.models.registry import open_model
from pipeline.planning.slice.chips import parse_slice
from pipeline.planning.slice.slice_plan import plan_job
from pipeline.step.compiler import use_compilation_cache
from tests.jobs import write_text

HANG_S = 10  # of CPU time; wall time may be six times that, since other work may use the machine
MOST_MIB = 2048
RUN_SHARE = 1 / 25  # of the cases that have a plan
GROUPS = {"fineweb": ParquetData, "arc": ArcData, "hf": HfData, "generate": GenerateData}

NUMBERS = [
    *("-1", "0", "1", "2", "3", "7", "64", "1000", "0.5", "-0.0", "1e-320", "1e20", "-1e308", "nan", "inf", "-inf"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "9" * 40, "9" * 5000, "0x10", "1_0", "٣"),
]
TEXTS = [
    *("''", "' '", "'\n'", "a", "é", "'日本'", "'\U0001f600'", '"it\'s"', "'%s %d {}'", "'{{ x }}'", "'{% for %}'"),
    *("'('", "'[a-'", "'(?P<a>)(?P<a>)'", "'a:b'", "':1'", "'a:0'", "'-'", "'\\\\'", "a" * 300, "x" * 20_000),
]
PLACES = [
    *(".", "..", "/", "/dev/null", "/dev/null/x", "/proc/self/mem", "'~'", "'~nosuchuser/x'", "'a/'", "'*'", "'[ab]*'"),
    *("no/such", "owner/name", "a/" * 3000, "file:///no/such", "'://'", "'x://y'", "memory://x", "FILE", "FILE/x"),
]
SHAPES = [
    *("null", "true", "false", "maybe", "", "[]", "[null]", "[1]", "[a,b]", "[[1],[2]]", "[" * 60 + "]" * 60, "{}"),
    *("{a: 1}", "{_target_: os.getcwd}", "???", "1,2", "range(3)", "choice(1,2)", "[0,0]", "[-1]", "[1e9]", "all"),
]
REFERENCES = [
    *("${run.max_tokens}", "${store.path}", "${nope}", "${oc.env:NOPE}", "${oc.env:LANG,x}", "${assets:x}", "${run}"),
    *("${assets:[1]}", "${data}", "${", "$", "${oc.decode:nan}", "'${capture.layers}'", "${hydra:job.name}"),
]
VALUES = [NUMBERS, TEXTS, PLACES, SHAPES, REFERENCES]


@dataclass(frozen=True)
class Key:
    name: str
    group: str  # a choice of data with this key
    kind: Any


def schema_keys() -> list[Key]:
    """Every key and group of keys, of every choice of data."""
    found = {name: Key(name, group, kind) for group, cls in GROUPS.items() for name, kind in _keys(RunConfig, "", cls)}
    return list(found.values())


def _keys(cls: type, prefix: str, data: type) -> Iterator[tuple[str, Any]]:
    for field in fields(cls):
        name = prefix + field.name
        kind = {"data": data, "data.prompts": ArcData}.get(name, field.type)
        yield name, kind
        if is_dataclass(kind):
            yield from _keys(kind, f"{name}.", data)


def make_cases(rng: random.Random, number: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The choice of data and the overrides of each case. First, each key gets each kind of value once."""
    keys = schema_keys()
    rng.shuffle(keys)
    for case in range(number):
        key = keys[case % len(keys)]
        overrides = [_override(rng, key, VALUES[(case // len(keys)) % len(VALUES)])]
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            other = rng.choice([other for other in keys if other.group == key.group])
            overrides.append(_override(rng, other, rng.choice(VALUES)))
        yield key.group, tuple(overrides)


def _override(rng: random.Random, key: Key, values: list[str]) -> str:
    value = rng.choice(values)
    if rng.random() < 0.15:
        value = rng.choice(_fitting(key.kind))
    form = rng.random()
    if form < 0.80:
        return f"{key.name}={value}"
    if form < 0.86:
        return f"++{key.name}={value}"
    if form < 0.90:
        return f"+{key.name}={value}"
    if form < 0.93:
        return rng.choice([f"~{key.name}", f"~{key.name}={value}"])
    return rng.choice(
        [f"+{key.name}x={value}", f"{key.name}x={value}", f"++{key.name}.x={value}", f"{key.name}", f"={value}"]
    )


def _fitting(kind: Any) -> list[str]:
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    members = [str(member) for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for member in kind]
    return members or (["2", "8", "16"] if int in kinds else ["0.25", "3"] if float in kinds else ["text", "true"])


class Fuzzer:
    """Plans cases, in a folder with data for every source."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        text = write_text(folder / "text", files=2, documents=6, max_characters=600)
        tasks = folder / "tasks"
        tasks.mkdir()
        pair = {"input": [[1, 2], [3, 4]], "output": [[4]]}
        (tasks / "a.json").write_text(json.dumps({"train": [pair, pair], "test": [pair]}))
        lines = folder / "lines.jsonl"
        lines.write_text("".join(json.dumps({"text": f"line {k}", "n": k}) + "\n" for k in range(20)))
        (folder / "file").touch()
        self._base = {
            "fineweb": ["data=fineweb", f"data.path={text}"],
            "arc": ["data=arc", f"data.path={tasks}"],
            "hf": ["data=hf", "data.path=json", f"data.data_files={lines}"],
            "generate": ["data=generate", f"data.path={tasks}", "data.rows=2", "data.max_new_tokens=4"],
        }

    def problem(self, group: str, given: tuple[str, ...], results: Counter, may_run: bool) -> str:
        """What is wrong with the outcome of one case; "" if nothing is. Counts the results."""
        overrides = [override.replace("FILE", str(self._folder / "file")) for override in given]
        base = [*self._base[group], f"store.path={self._folder / 'store'}", "batch.rows=2", "batch.length=64"]
        began, computed, problem = time.monotonic(), time.process_time(), ""
        try:
            results[_plan([*base, "run.progress=false", "run.max_tokens=200", *overrides], may_run)] += 1
        except PipelineError as error:
            results[f"exit {error.exit_code}"] += 1
            problem = _problem_of(error, overrides)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        if time.process_time() - computed > HANG_S or seconds > 6 * HANG_S:
            problem = f"{problem} took {seconds:.0f} s"
        if peak_rss_mib() > MOST_MIB:
            problem = f"{problem} peak of {peak_rss_mib()} MiB"
        return problem


def _plan(overrides: list[str], may_run: bool) -> str:
    config = composing.compose(overrides)
    if config.topology is not None:
        model = config.model
        opened = open_model(model.path, revision=model.revision, init=str(model.init), seed=model.seed)
        plan_job(config, opened, parse_slice(config.topology))
        return "plan"
    use_compilation_cache(config.run.compilation_cache)
    open_job(config)
    if not may_run or "://" in config.store.path:
        return "plan"
    with tempfile.TemporaryDirectory() as store:
        run(replace(config, store=replace(config.store, path=store)))
    return "run"


def _problem_of(error: PipelineError, overrides: list[str]) -> str:
    message = command_line.described(error)
    is_remote = "Hub" in message or any("://" in override for override in overrides)
    if error.exit_code != EXIT_INVALID and not is_remote:
        return f"exit code {error.exit_code} for an error that a retry does not fix: {message}"
    if len(message) > 4200 or len(message.splitlines()) > 5:
        return f"a message of {len(message)} characters: {message[:200]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, results, problems = random.Random(args.seed), Counter(), 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # relative paths are created here
        fuzzer = Fuzzer(Path(folder))
        for group, overrides in make_cases(rng, args.cases):
            faulthandler.dump_traceback_later(6 * HANG_S, exit=True)  # for code that hangs outside Python
            if problem := fuzzer.problem(group, overrides, results, may_run=rng.random() < RUN_SHARE):
                problems += 1
                print(f"PROBLEM {group} {[shortened(override, 100) for override in overrides]}: {problem}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"{args.cases} cases, {len(schema_keys())} keys: {dict(results)}; {problems} problems")
    return problems > 0


if __name__ == "__main__":
    raise SystemExit(main())
