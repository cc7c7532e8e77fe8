"""Random damage to stores of every kind, checked in a process that may die of it.

`damage_stores` makes the stores, `damage_operators` and `damage_values` damage them, and `damage_oracle` defines which
outcomes are right.

By hand: `python -m tests.store.damage_fuzzer --kind int8 --seeds 0:1000`
"""

import argparse
import multiprocessing
import random
import resource
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from tests.store import damage_operators, damage_values
from tests.store.damage_operators import Damage, Operator, kind_of
from tests.store.damage_oracle import Oracle, Outcome, Verdict, check_resumed
from tests.store.damage_stores import KINDS, Specimen, make_specimen
from tests.store.example_store import Image

OPERATORS = damage_operators.OPERATORS | damage_values.OPERATORS
LIMIT_S = 120.0  # per case, before it is taken to hang; most take 0.05 s
LIMIT_GIB = 4  # per case, so that a huge shape raises MemoryError


@dataclass(frozen=True)
class Case:
    """One damaged store and its outcome."""

    kind: str
    seed: int
    operator: str
    damage: Damage
    verdict: Verdict

    @property
    def outcome(self) -> Outcome:
        return self.verdict.outcome

    def __str__(self) -> str:
        return (
            f"{self.outcome} {self.kind} seed {self.seed} {self.operator}: {self.damage.what}\n    {self.verdict.why}"
        )


class Checker:
    """Runs oracles in a separate process, which is replaced if it dies or hangs."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")  # a fork would inherit TensorStore without its threads
        self._specimen: Specimen | None = None
        self._start()

    def use(self, specimen: Specimen) -> None:
        """Makes this the store of the following cases."""
        self._specimen = specimen
        self._connection.send(specimen)

    def check(self, image: Image, damage: Damage) -> Verdict:
        try:
            self._connection.send((image, damage))
            if self._connection.poll(LIMIT_S):
                return self._connection.recv()
            verdict = Verdict(Outcome.crashed, f"no answer after {LIMIT_S:g} s")
        except (EOFError, ConnectionError):
            self._process.join()
            verdict = Verdict(Outcome.crashed, f"the process died: exit code {self._process.exitcode}")
        self.close()
        self._start()
        return verdict

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _start(self) -> None:
        self._connection, other = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        if self._specimen is not None:
            self.use(self._specimen)


def _serve(connection: Connection) -> None:
    """Serves `Checker`. Receives either a store, for the cases that follow, or a case."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    while True:
        match connection.recv():
            case Specimen() as specimen:
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
                oracle = Oracle(specimen)
                oracle.check(specimen.image, Damage("nothing"))  # starts threads, which the memory limit would prevent
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limit = pages * resource.getpagesize() + (LIMIT_GIB << 30)
                resource.setrlimit(resource.RLIMIT_AS, (limit, most))
            case image, damage:
                connection.send(oracle.check(image, damage))


def run_cases(checker: Checker, specimen: Specimen, seeds: Sequence[int], folder: Path | None = None) -> Iterator[Case]:
    """Damages the store once per seed. First checks the sound store, for which verify must report nothing.

    Damage to objects that only jobs read is judged by running jobs in `folder`; without it, only deletions count as
    harmless.
    """
    checker.use(specimen)
    sound = checker.check(specimen.image, Damage("nothing"))
    if sound.outcome is not Outcome.harmless:
        sound = Verdict(Outcome.false_alarm, sound.why)
    yield Case(specimen.kind, -1, "none", Damage("nothing"), sound)
    for seed in seeds:
        operator, damage, image = damaged(random.Random(f"{specimen.kind} {seed}"), specimen)
        verdict = checker.check(image, damage)
        if verdict.outcome is Outcome.missed:
            verdict = _judged_by_jobs(specimen, image, folder) or verdict
        elif verdict.outcome is Outcome.harmless and folder is not None and specimen.finished is not None:
            verdict = check_resumed(specimen, image, folder)
        yield Case(specimen.kind, seed, operator, damage, verdict)


def damaged(rng: random.Random, specimen: Specimen) -> tuple[str, Damage, Image]:
    """The operator, what it did, and the damaged store. One time in eight, a second operator follows."""
    image: dict[str, bytes] = {}
    while not image or image == specimen.image:
        image = dict(specimen.image)
        name, damage = _apply_one(rng, image, specimen, OPERATORS)
        if rng.random() < 1 / 8:
            second, more = _apply_one(rng, image, specimen, damage_operators.OPERATORS)
            what = f"{damage.what}; {second}: {more.what}"
            damage = Damage(what, damage.is_visible and more.is_visible)
    return name, damage, image


def _apply_one(
    rng: random.Random, image: dict[str, bytes], specimen: Specimen, operators: Mapping[str, Operator]
) -> tuple[str, Damage]:
    """Applies one operator. If it finds nothing to damage, another is tried."""
    while True:
        name = rng.choice(sorted(operators))
        before = dict(image)
        damage = operators[name](rng, image, specimen.older)
        if damage is not None and image != before:
            return name, damage


def _judged_by_jobs(specimen: Specimen, image: Image, folder: Path | None) -> Verdict | None:
    """The outcome for groups and kept activations, which no reader reads; None if anything else is damaged, too."""
    different = {key for key in {*specimen.image, *image} if specimen.image.get(key) != image.get(key)}
    if any(kind_of(key) not in ("group", "kept", "metrics", "other") for key in different):
        return None
    if folder is not None and specimen.finished is not None:
        return check_resumed(specimen, image, folder)
    for_jobs = {key for key in different if kind_of(key) in ("group", "kept")}
    return Verdict(Outcome.harmless, "deleted objects are made again") if for_jobs.isdisjoint(image) else None


def table(cases: Sequence[Case]) -> str:
    """A table of the outcomes' counts by operator and by kind of store."""
    outcomes = [outcome for outcome in Outcome if any(case.outcome is outcome for case in cases)]
    lines = [f"{'':20}" + "".join(f"{outcome.value:>12}" for outcome in outcomes)]
    for group in ("operator", "kind"):
        counts = Counter((getattr(case, group), case.outcome) for case in cases)
        for name in sorted({name for name, _ in counts}):
            lines.append(f"{name:20}" + "".join(f"{counts[name, outcome]:12}" for outcome in outcomes))
        lines.append("")
    totals = Counter(case.outcome for case in cases)
    return "\n".join([*lines, f"{'all':20}" + "".join(f"{totals[outcome]:12}" for outcome in outcomes)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seeds", default="0:100", help="first:last")
    arguments = parser.parse_args()
    seeds = range(*map(int, arguments.seeds.split(":")))
    cases = []
    with closing(Checker()) as checker, tempfile.TemporaryDirectory(prefix="damage-") as folder:
        for kind in arguments.kind or KINDS:
            for case in run_cases(checker, make_specimen(kind, Path(folder)), seeds, Path(folder)):
                cases.append(case)
                if case.outcome.is_failure:
                    print(case, flush=True)
    print(table(cases))


if __name__ == "__main__":
    main()
