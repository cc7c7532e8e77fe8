"""Does the model know how large the next grid will be? A linear probe on ARC-AGI tasks, for every layer.

    python scripts/examples/probe_arc.py [--tasks DIR] [--model Qwen/Qwen2.5-0.5B]

A prompt contains a task's examples and its test input, each grid after the label `input:` or `output:`. The job stores
activations of the labels' colons only (`capture.positions=regex`). From these, ridge regression predicts the numbers of
rows and columns of the following grid, which the model has not seen yet. Each third of the tasks is predicted by a
probe fitted on the other two. An output's size follows from its input and the examples; an input's size can only be
guessed. The embedding, which comes first, is the same for every colon, so it predicts nothing. The last line printed is
the share of the variance of the outputs' sizes that the best layer explains.

By default, runs the bundled model on the demo's tasks, in a minute. N: labels, D: width of an activation.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from pipeline.store import ActivationStore

MAKE_TASKS = Path(__file__).parents[1] / "demo" / "make_demo_tasks.py"
TINY = "${assets:tiny-qwen2}"
RIDGE = 30.0  # for standardised activations
FOLDS = 3


def fill_store(path: Path, tasks: Path, model: str, length: int) -> ActivationStore:
    """Fills a store with all layers' activations at the labels of all prompts. Prompts longer than a row are cut."""
    overrides = [
        *("data=arc", f"data.path={tasks}", f"model.path={model}", f"store.path={path}"),
        *(f"batch.length={length}", "batch.long_documents=cut", "capture.positions=regex", "capture.regex=':'"),
        *("capture.layers=all", "capture.sites=[resid_pre,resid_post]", "capture.dtype=float32"),
    ]
    print("python -m pipeline.run", *overrides, flush=True)
    subprocess.run([sys.executable, "-m", "pipeline.run", *overrides], check=True)
    return ActivationStore.open(str(path))


def grid_sizes(document: dict, tasks: Path) -> list[tuple[int, int]]:
    """Rows and columns of the prompt's grids, in its order: input and output of each example, then of the test. NaN if
    the task does not contain the grid."""
    task = json.loads((tasks / f"{document['task']}.json").read_text())
    examples = [task["train"][int(number)] for number in document["order"].split(",")]
    pairs = [*examples, task["test"][document["test"]]]
    sides = (pair.get(side) for pair in pairs for side in ("input", "output"))
    return [(np.nan, np.nan) if grid is None else np.shape(grid) for grid in sides]


def explained(x: np.ndarray, y: np.ndarray, fold: np.ndarray) -> float:
    """The share of the variance of y [N, 2] that ridge regressions on x [N, D] explain. Each fold [N] is predicted by a
    regression on the others. Negative if their means predict better."""
    errors = np.zeros(2)
    for test in (fold == number for number in range(FOLDS)):
        mean, scale, centre = x[~test].mean(axis=0), x[~test].std(axis=0) + 1e-6, y[~test].mean(axis=0)
        z = (x - mean) / scale
        fit = z[~test]
        weights = np.linalg.solve(fit.T @ fit + RIDGE * np.eye(x.shape[1]), fit.T @ (y[~test] - centre))
        errors += [np.square((z @ weights + centre - y)[test]).sum(), np.square((y - centre)[test]).sum()]
    return 1 - errors[0] / errors[1]


def main(tasks: Path | None, model: str, length: int) -> float:
    """The share of the variance of the outputs' sizes that the best layer explains."""
    with tempfile.TemporaryDirectory() as name:
        if tasks is None:
            tasks = Path(name) / "tasks"
            subprocess.run([sys.executable, MAKE_TASKS, "--out", tasks], check=True)
        store = fill_store(Path(name) / "store", tasks, model, length)
        keys = ["blocks.0.resid_pre", *(f"blocks.{layer}.resid_post" for layer in store.layers)]
        labels = next(store.batches(keys, store.num_activations, shuffle=False, dtype="float32"))
        documents = {document["document"]: document for document in store.documents().to_pylist()}
        sizes = {number: grid_sizes(document, tasks) for number, document in documents.items()}

    _, first = np.unique(labels.documents, return_index=True)
    number = np.arange(len(labels.documents)) - first[np.searchsorted(labels.documents[first], labels.documents)]
    size = np.array([sizes[document][i] for document, i in zip(labels.documents, number, strict=True)], np.float64)
    is_known, is_output = ~np.isnan(size).any(axis=1), number % 2 == 1
    inputs, outputs = is_known & ~is_output, is_known & is_output
    _, task = np.unique([documents[document]["task"] for document in labels.documents], return_inverse=True)
    print(f"{outputs.sum()} outputs and {inputs.sum()} inputs of {task.max() + 1} tasks")

    shares = {}
    for array, x in labels.activations.items():
        shares[array] = [explained(x[chosen], size[chosen], task[chosen] % FOLDS) for chosen in (inputs, outputs)]
        print(f"{array:20} inputs {shares[array][0]:6.3f}   outputs {shares[array][1]:6.3f}")
    best = max(shares, key=lambda array: shares[array][1])
    print(f"{best} explains {shares[best][1]:.2f} of the variance of the outputs' sizes")
    return shares[best][1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, help="folder with a file per task")
    parser.add_argument("--model", default=TINY)
    parser.add_argument("--length", type=int, default=1024, help="length of rows; longer prompts are cut")
    options = parser.parse_args()
    main(options.tasks, options.model, options.length)
