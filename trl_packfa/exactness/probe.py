"""A few documents and the ways to run them through a model: packed in one row or in several, and each alone.

Shape letters: B rows, L row length, S documents, V vocabulary, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from ..errors import InvalidLayout
from ..layout import PackedLayout
from ..patching.named_models import as_sdpa
from ..runtime.boundaries import layout_of
from ..runtime.zero3 import whole_shape
from .documents import Documents

Collator: TypeAlias = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
Rows: TypeAlias = tuple[tuple[int, ...], ...]


class Probe:
    """Documents, what replaces each, and fixed random weights of their logits.

    Args:
        model (`torch.nn.Module`):
            A patched causal LM.
        collator (`Callable`):
            Makes the row of `packed`.
        tokens (`list[torch.Tensor]`), others (`list[torch.Tensor]`):
            Token ids `(n,)` of each document, and of what may replace it.
        rows (`tuple[tuple[int, ...], ...]`):
            The documents of each row of `in_rows`; shorter rows end in padding.
        seed (`int`):
            Of the weights.

    Raises:
        [`InvalidLayout`]: if the collator's batch tells no boundaries.
    """

    def __init__(
        self, model: nn.Module, collator: Collator, tokens: Documents, others: Documents, rows: Rows, seed: int
    ) -> None:
        self.model, self.collator, self.seed = model, collator, seed
        self.device = device_of(model)
        self.tokens, self.others = tokens, others
        self.lengths = tuple(map(len, tokens))
        # The collator may pad: one more document.
        layout = layout_of(collator(_examples(tokens)))
        if layout is None:
            raise InvalidLayout(
                f"{type(collator).__name__} packs {len(tokens)} documents into a batch that tells no boundaries.",
                do="Let it send position_ids that restart, cu_seq_lens_q or packed_layout, and no padding mask.",
            )
        self.row = Arrangement.of_row(layout, len(tokens))
        self.rows = Arrangement.of_rows(self.lengths, rows, self.device)

    def replaced(self, which: Sequence[bool]) -> Documents:
        """The documents, some of them replaced."""
        return [b if other else a for a, b, other in zip(self.tokens, self.others, which, strict=True)]

    def packed(self, tokens: Documents, *, told: Sequence[str] | None = None) -> Documents:
        """Logits `(n, V)` of each document, from one packed row as the collator makes it; with `told` the call is told
        nothing but these of its keys."""
        batch = self.collator(_examples(tokens))
        # With them the model would compute a loss, which nobody reads.
        del batch["labels"]
        batch = {k: v.to(self.device) if hasattr(v, "to") else v for k, v in batch.items()}
        if told is not None:
            batch = {name: value for name, value in batch.items() if name == "input_ids" or name in told}
        return self.row.split(self.model(**batch, use_cache=False).logits)

    def in_rows(self, tokens: Documents) -> Documents:
        """The same from several rows."""
        layout = self.rows.layout
        # Not by the collator, which makes one row: these are several, each filled up with a document of padding.
        ids = torch.zeros(layout.num_tokens, dtype=torch.long)
        for place, document in zip(self.rows.places, tokens, strict=True):
            ids[place] = document
        ids = ids.view(layout.rows, -1).to(self.device)
        positions = layout.position_ids()
        return self.rows.split(
            self.model(input_ids=ids, position_ids=positions, packed_layout=layout, use_cache=False).logits
        )

    def alone(self, document: int) -> torch.Tensor:
        """Logits `(n, V)` of one document by itself."""
        ids = self.tokens[document][None].to(self.device)
        with as_sdpa():  # a model that runs by name: under a mask, which knows windows that its attention is not told
            return self.model(input_ids=ids, use_cache=False).logits[0]

    def backward(self, logits: Sequence[torch.Tensor], documents: Sequence[int], *, scale: float) -> None:
        """Add `scale` times the gradient of a fixed random weighting of these documents' logits."""
        losses = []
        for document, logits_nV in zip(documents, logits, strict=True):
            # By document, so that it is weighed alike alone, packed, and among others.
            generator = torch.Generator().manual_seed(self.seed + 1 + document)
            weights_V = torch.randn(logits_nV.shape[-1], generator=generator) / logits_nV.shape[-1] ** 0.5
            # Each token its own: a sum of equal terms would stand still in half precision.
            weights_n = torch.randn(len(logits_nV), generator=generator)
            losses.append(weights_n.to(logits_nV.device) @ (logits_nV.float() @ weights_V.to(logits_nV.device)))
        with torch.autocast(self.device.type, enabled=False):  # as the Trainer's backward runs
            (scale * torch.stack(losses).sum()).backward()

    def loss(self, logits: Documents) -> float:
        """Mean loss of the documents' logits under the labels that the collator makes."""
        labels = self.collator(_examples(self.tokens))["labels"].flatten()
        # Places leave a collator's padding out. The label behind a document's last token is the next one's first,
        # -100.
        labels = labels[torch.cat(self.row.places)].to(self.device)
        return _mean_loss(torch.cat([x.float() for x in logits])[:-1], labels[1:])

    def loss_alone(self, logits: Documents) -> float:
        """Mean loss of the documents' logits, each predicting its own next tokens."""
        own = [(x[:-1].float(), ids[1:].to(self.device)) for x, ids in zip(logits, self.tokens, strict=True)]
        predicted, ids = (torch.cat(part) for part in zip(*own, strict=True))
        return _mean_loss(predicted, ids)

    def embedding_gradients(
        self,
        run: Callable[[Documents], Documents],
        tokens: Documents,
        losses: Sequence[int],
        arrangement: Arrangement,
        *,
        scale: float,
    ) -> tuple[Documents, Documents | None]:
        """Logits of each document and the gradients `(n, D)` of its embeddings, where only these documents have a
        loss, `scale` times a weighting of their logits; `None` where the model embeds otherwise. Parameters get no
        gradients."""
        # Only the embeddings' gradient is asked for: those of weights would cost memory and time for nothing.
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            with self._embedded() as outputs:
                logits = run(tokens)
                if all(t.requires_grad for t in logits):
                    self.backward([logits[i] for i in losses], losses, scale=scale)
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
        logits = [t.detach() for t in logits]
        # A backbone that runs document by document embeds each group in a call of its own.
        if len(outputs) != 1 or outputs[0].shape[:2] != arrangement.shape or outputs[0].grad is None:
            return logits, None
        return logits, arrangement.split(outputs[0].grad)

    @contextmanager
    def _embedded(self) -> Iterator[list[torch.Tensor]]:
        """Outputs of the input embeddings, with gradients."""
        outputs: list[torch.Tensor] = []

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            # A leaf of its own: nothing before the embeddings is asked for. Models add to what they get in place.
            outputs.append(output.detach().requires_grad_(True))
            return outputs[-1].clone()

        handle = self.model.get_input_embeddings().register_forward_hook(hook)  # type: ignore[operator, union-attr]
        try:
            yield outputs
        finally:
            handle.remove()

    def outputs_packed(self, tokens: Documents, *, rows: bool = False) -> dict[str, Documents]:
        """Every module's per-token output, by document, in the order in which modules finish."""
        arrangement, run = (self.rows, self.in_rows) if rows else (self.row, self.packed)
        found = self._outputs(lambda: run(tokens), arrangement.shape)
        return {name: arrangement.split(output) for name, output in found}

    def outputs_alone(self, document: int) -> dict[str, torch.Tensor]:
        """The same of one document by itself."""
        shape = (1, self.lengths[document])
        return {name: output[0] for name, output in self._outputs(lambda: self.alone(document), shape)}

    def _outputs(self, run: Callable[[], object], shape: tuple[int, int]) -> list[tuple[str, torch.Tensor]]:
        seen: list[tuple[str, torch.Tensor]] = []

        def watch(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                output = output[0] if isinstance(output, tuple) else output
                if isinstance(output, torch.Tensor) and output.shape[:2] == shape and output.is_floating_point():
                    seen.append((name, output.detach()))

            return hook

        handles = [module.register_forward_hook(watch(name)) for name, module in self.model.named_modules()]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        return seen


class Arrangement:
    """Where each document's tokens lie in a batch."""

    def __init__(self, layout: PackedLayout, order: Sequence[int | None]) -> None:
        self.layout = layout
        ends = torch.tensor(layout.lengths).cumsum(0)
        places = {
            document: torch.arange(int(end) - length, int(end))
            for document, end, length in zip(order, ends, layout.lengths, strict=True)
            if document is not None
        }
        self.places = [places[document] for document in sorted(places)]

    @classmethod
    def of_row(cls, layout: PackedLayout, documents: int) -> Arrangement:
        """One row, in the documents' order; what comes after them is padding."""
        return cls(layout, [i if i < documents else None for i in range(layout.num_documents)])

    @classmethod
    def of_rows(cls, lengths: Sequence[int], rows: Rows, device: torch.device) -> Arrangement:
        """Several rows, as long as the longest, padded by a document each."""
        # Lengths (11, 24, 150) in rows ((0, 2), (1,)): packed [11, 150, 24, 137], order [0, 2, 1, None], of 161 tokens
        # each.
        longest = max(sum(lengths[i] for i in row) for row in rows)
        packed: list[int] = []
        order: list[int | None] = []
        for row in rows:
            padding = longest - sum(lengths[i] for i in row)
            packed += [*(lengths[i] for i in row), *([padding] if padding else [])]
            order += [*row, *([None] if padding else [])]
        return cls(PackedLayout.from_lengths(packed, rows=len(rows), device=device), order)

    @property
    def shape(self) -> tuple[int, int]:
        """`(B, L)`."""
        return self.layout.rows, self.layout.row_length

    def split(self, tensor: torch.Tensor) -> Documents:
        """Each document's part `(n, ...)` of a tensor `(B, L, ...)`."""
        flat = tensor.flatten(0, 1)
        return [flat[place] for place in self.places]


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first weights are; offloaded ones are nowhere until they are used."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def vocabulary_of(model: Any) -> int:
    """How many tokens the model both reads and predicts."""
    head = model.get_output_embeddings()
    sizes = [
        whole_shape(layer.weight)[0] for layer in (model.get_input_embeddings(), head) if hasattr(layer, "weight")
    ]
    # 4-bit weights are flat: their layers know how many features come out
    sizes += [head.out_features] if hasattr(head, "out_features") else []
    return min(size for size in sizes if size > 1)


def _examples(documents: Documents) -> list[dict[str, Any]]:
    return [{"input_ids": ids.tolist()} for ids in documents]


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Summed in float64: the same losses in another order are the same mean, however large."""
    losses = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    # On the host, as Apple's devices know no float64.
    return float(losses[labels != -100].cpu().double().mean())
