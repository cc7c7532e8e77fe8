"""Gathers the rows of steps into one result per document.

Shapes: n tokens of a document, m of which have activations, D width of an array, G scales of a token; B rows of a step,
T positions of a row, S slots of a row for activations.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int16, Int32, Int64

from pipeline.core.sites import ByName
from pipeline.data.documents import SkippedDocument, TokenBlock
from pipeline.data.text.labels import Label
from pipeline.data.tokenised import TokenisedDocument
from pipeline.step.compiled_step import StepOutputs
from pipeline.step.spec import StepSpec
from pipeline.store.format.layout import scale_name
from pipeline.store.read.frameworks import FeatureBatch, Framework, feature_batches
from pipeline.store.read.rows import at_selected

_TOKENS, _IS_STORED, _LABELS = "tokens", "is_stored", "labels"
_TOKEN_DOCUMENTS, _SLOT_DOCUMENTS = "token documents", "slot documents"


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
    labels: of the n tokens of a chat, int16 [n, 5]: message, exchange, role, part, and whether the assistant wrote it;
    None for other documents, and for a chat template whose texts cannot be followed.
    """

    tokens: Int32[np.ndarray, " n"]
    positions: Int32[np.ndarray, " m"]
    activations: Mapping[str, Any]
    scales: Mapping[str, Any]
    outputs: Mapping[str, Any]
    features: Mapping[str, FeatureBatch] = field(default_factory=dict)
    num_cut: int = 0
    skipped: str | None = None
    labels: Int16[np.ndarray, "n 5"] | None = None


class Collector:
    """Gathers the outputs of steps, and divides them by document."""

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        # By array name, the values of valid slots, step by step; with their documents for slots of tokens, and of
        # activations.
        self._parts: dict[str, list[np.ndarray]] = defaultdict(list)

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
        of_tokens = {_TOKEN_DOCUMENTS: documents, _TOKENS: block.tokens[rows], _IS_STORED: is_stored}
        labels = np.zeros((*block.tokens.shape, len(Label)), np.int16) if block.labels is None else block.labels
        self._add(documents, of_tokens | {_LABELS: labels[rows]})
        arrays = zip(self._spec.stored_arrays, outputs.arrays, strict=True)
        self._add(slots, {_SLOT_DOCUMENTS: slots} | {array.name: np.asarray(values) for array, values in arrays})

    def _add(self, documents: Int64[np.ndarray, "B S"], arrays: Mapping[str, np.ndarray]) -> None:
        """Keeps the slots of arrays [B, S, ...] that have a document; -1 is padding. The arrays may have more rows."""
        for name, values in arrays.items():
            self._parts[name].append(values[: len(documents)][documents >= 0])

    def documents(
        self,
        items: Sequence[TokenisedDocument | SkippedDocument],
        convert: Callable[[np.ndarray], Any],
        framework: Framework,
    ) -> list[ExtractedDocument]:
        """One result per item, with arrays that `convert` makes arrays of the framework. Call it once, after all steps
        were added: it releases the gathered arrays."""
        nothing = {_TOKENS: np.empty(0, np.int32), _IS_STORED: np.empty(0, bool)}
        nothing[_LABELS] = np.empty((0, len(Label)), np.int16)
        nothing |= {array.name: np.empty((0, *array.token_shape), array.dtype) for array in self._spec.stored_arrays}
        last = np.cumsum([isinstance(item, TokenisedDocument) for item in items])  # documents up to each item
        divided = {}
        for slots, names in ((_TOKEN_DOCUMENTS, list(nothing)[:3]), (_SLOT_DOCUMENTS, list(nothing)[3:])):
            documents = np.concatenate([np.empty(0, np.int64), *self._parts.pop(slots, [])])
            order = np.argsort(documents, kind="stable")
            ends = np.searchsorted(documents[order], last)[:-1]
            for name in names:
                values = np.concatenate([nothing[name], *self._parts.pop(name, [])])
                divided[name] = [values.take(places, axis=0) for places in np.split(order, ends)]
        arrays = ({name: values[place] for name, values in divided.items()} for place in range(len(items)))
        return [self._result(*pair, convert, framework) for pair in zip(items, arrays, strict=True)]

    def _result(
        self,
        item: TokenisedDocument | SkippedDocument,
        arrays: Mapping[str, np.ndarray],
        convert: Callable[[np.ndarray], Any],
        framework: Framework,
    ) -> ExtractedDocument:
        skipped = item.reason if isinstance(item, SkippedDocument) else None
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
            num_cut=0 if skipped else max(0, len(item.tokens) - len(arrays[_TOKENS])),  # windows may repeat some
            skipped=skipped,
            labels=None if skipped or item.labels is None else arrays[_LABELS],
        )
