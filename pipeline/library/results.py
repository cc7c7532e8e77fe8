"""Gathers the rows of steps into one result per document.

Shapes: n tokens of a document, m of which have activations, D width of an array, G scales of a token; B rows of a step,
T positions of a row, S slots of a row for activations.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64

from pipeline.core.sites import ByName
from pipeline.data.documents import SkippedDocument, TokenBlock
from pipeline.data.tokenised import TokenisedDocument
from pipeline.step.compiled_step import StepOutputs
from pipeline.step.spec import StepSpec
from pipeline.store.format.scaled import scale_name
from pipeline.store.read.features import FeatureBatch, feature_batches
from pipeline.store.read.frameworks import Framework
from pipeline.store.read.rows import at_selected

_TOKENS, _IS_STORED = "tokens", "is_stored"


@dataclass(frozen=True)
class ExtractedDocument:
    """The n tokens of a document that the model computed, and the activations of m of these tokens. m is n unless the
    option `positions` selects some.

    Activations, scales and outputs are arrays of the requested framework; the others are numpy arrays.

    tokens: int32 [n]. positions: int32 [m], the ascending indices of the m tokens among the n. A document longer than a
    row is split into windows that are computed independently: token p has position p % length in its window.
    activations: [m, D], by array name. scales: with int8 and float8, float32 [m, G], by array name; each is for D / G
    neighbouring features. outputs: outputs of the model's head, [m] or [m, k], by name (option `outputs`), and the
    arrays of features. features: sparse features by SAE name (option `encode`), e.g. "blocks.5.resid_post".
    num_cut: number of tokens that `long_documents="cut"` left out.
    skipped: the reason if `on_error="skip"` skipped the document, else None.
    """

    tokens: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " m"]
    activations: Mapping[str, Any]
    scales: Mapping[str, Any]
    outputs: Mapping[str, Any]
    features: Mapping[str, FeatureBatch] = field(default_factory=dict)
    num_cut: int = 0
    skipped: str | None = None


class Collector:
    """Gathers the outputs of steps by document."""

    def __init__(self, spec: StepSpec, num_documents: int) -> None:
        self._spec = spec
        self._parts: list[dict[str, list[np.ndarray]]] = [defaultdict(list) for _ in range(num_documents)]

    def add(self, block: TokenBlock, first_row: int, outputs: StepOutputs) -> None:
        """Adds the outputs of the step for the rows of a block from `first_row` on. Waits for the step."""
        rows = slice(first_row, first_row + len(outputs.arrays[0]))
        documents, is_stored = block.documents[rows], block.segments[rows] > 0
        slots = documents
        if block.selected is not None:
            selected = block.selected[rows]
            slots = at_selected(documents, selected, -1)
            is_stored = np.zeros_like(is_stored)
            row, slot = np.nonzero(selected >= 0)
            is_stored[row, selected[row, slot]] = True
        self._gather(documents, {_TOKENS: block.tokens[rows], _IS_STORED: is_stored})
        arrays = zip(self._spec.stored_arrays, outputs.arrays, strict=True)
        self._gather(slots, {array.name: np.asarray(values) for array, values in arrays})

    def _gather(self, documents: Int64[np.ndarray, "B S"], arrays: Mapping[str, np.ndarray]) -> None:
        """Splits arrays [B, S, ...] by the documents of the slots; -1 is padding. The arrays may have more rows."""
        order = np.argsort(documents, axis=None, kind="stable")
        numbers, starts = np.unique(documents.reshape(-1)[order], return_index=True)
        flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in arrays.items()}
        for number, places in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            for name, values in flat.items() if number >= 0 else ():
                self._parts[number][name].append(values.take(places, axis=0))

    def documents(
        self,
        items: Sequence[TokenisedDocument | SkippedDocument],
        convert: Callable[[np.ndarray], Any],
        framework: Framework,
    ) -> list[ExtractedDocument]:
        """One result per item, with arrays that `convert` makes arrays of the framework. Call it once, after all steps
        were added: it releases the gathered arrays."""
        nothing = {_TOKENS: np.empty(0, np.int32), _IS_STORED: np.empty(0, bool)}
        nothing |= {array.name: np.empty((0, *array.token_shape), array.dtype) for array in self._spec.stored_arrays}
        parts, self._parts = iter(self._parts), []
        results = []
        for item in items:
            if isinstance(item, SkippedDocument):
                results.append(self._result(nothing, convert, framework, skipped=item.reason))
                continue
            gathered = next(parts)
            joined = {name: _joined(gathered[name], empty) for name, empty in nothing.items()}
            results.append(self._result(joined, convert, framework, num_cut=len(item.tokens) - len(joined[_TOKENS])))
        return results

    def _result(
        self,
        arrays: Mapping[str, np.ndarray],
        convert: Callable[[np.ndarray], Any],
        framework: Framework,
        num_cut: int = 0,
        skipped: str | None = None,
    ) -> ExtractedDocument:
        names = [key.name for key in self._spec.keys]
        outputs = {spec.name: convert(arrays[spec.name]) for spec in self._spec.stored_arrays.outputs}
        widths = {encoder.name: encoder.sae.width for encoder in self._spec.encoders}
        return ExtractedDocument(
            tokens=arrays[_TOKENS],
            positions=np.flatnonzero(arrays[_IS_STORED]).astype(np.int32),
            activations=ByName((name, convert(arrays[name])) for name in names),
            scales={name: convert(arrays[scale_name(name)]) for name in names if scale_name(name) in arrays},
            outputs=outputs,
            features=feature_batches(widths, outputs, framework),
            num_cut=num_cut,
            skipped=skipped,
        )


def _joined(parts: Sequence[np.ndarray], empty: np.ndarray) -> np.ndarray:
    return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else empty


def start_copies(outputs: StepOutputs) -> None:
    """Starts copying the outputs that `Collector.add` reads to the host."""
    for values in (*outputs.arrays, outputs.counts):
        values.copy_to_host_async()
