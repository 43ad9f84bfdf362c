"""One small packed batch and the ways to run it through a model.

Shape letters: T packed tokens, S documents, V vocabulary, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from ..boundaries import layout_of
from ..errors import InvalidLayout
from ..layout import PackedLayout
from ..zero3 import whole_shape

# The documents of each of the two rows; the shorter row ends in padding.
_TWO_ROWS = ((0, 2), (1, 3, 4))

Documents: TypeAlias = list[torch.Tensor]
Collator: TypeAlias = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


class Probe:
    """Documents of random tokens, the same with one of them replaced, and fixed weights of their logits."""

    def __init__(
        self, model: nn.Module, collator: Collator, lengths: tuple[int, ...], changed: int, seed: int
    ) -> None:
        self.model, self.collator, self.lengths = model, collator, lengths
        self.device = device_of(model)
        self.seed, generator = seed, torch.Generator().manual_seed(seed)
        vocabulary = vocabulary_of(model)
        draw = [torch.randint(1, vocabulary, (n,), generator=generator) for n in (*lengths, lengths[changed])]
        self.tokens, other = draw[:-1], draw[-1]
        self.changed = [other if i == changed else tokens for i, tokens in enumerate(self.tokens)]
        # The collator may pad: one more document.
        layout = layout_of(collator(_examples(self.tokens)))
        if layout is None:
            raise InvalidLayout(
                f"{type(collator).__name__} packs five documents into a batch that tells no boundaries.",
                do="Let it send position_ids that restart, cu_seq_lens_q or packed_layout, and no padding mask.",
            )
        self.layout = layout

    def packed(self, tokens: Documents, *, boundaries: bool = True) -> Documents:
        """Logits `(length, V)` of each document, from one packed row as the collator makes it."""
        batch = self._batch(tokens)
        if not boundaries:
            batch = {"input_ids": batch["input_ids"]}
        return self._split(self.model(**batch, use_cache=False).logits)

    def two_rows(self) -> Documents:
        """The same documents from two rows, the shorter one padded by a document."""
        totals = [sum(self.lengths[i] for i in row) for row in _TWO_ROWS]
        rows, lengths = [], []
        for row, total in zip(_TWO_ROWS, totals, strict=True):
            padding = max(totals) - total
            rows.append(torch.cat([*(self.tokens[i] for i in row), torch.zeros(padding, dtype=torch.long)]))
            lengths.append([*(self.lengths[i] for i in row), *([padding] if padding else [])])
        layout = PackedLayout.from_lengths([n for row in lengths for n in row], rows=2, device=self.device)
        ids = torch.stack(rows).to(self.device)
        logits = self.model(
            input_ids=ids, position_ids=layout.position_ids(), packed_layout=layout, use_cache=False
        ).logits
        split = iter(layout.split(logits))
        found = {i: next(split) for i in _TWO_ROWS[0]}
        if len(lengths[0]) > len(_TWO_ROWS[0]):
            next(split)
        found |= {i: next(split) for i in _TWO_ROWS[1]}
        return [found[i] for i in range(len(self.lengths))]

    def alone(self, document: int) -> torch.Tensor:
        """Logits `(length, V)` of one document by itself."""
        return self.model(input_ids=self.tokens[document][None].to(self.device), use_cache=False).logits[0]

    def padded(self) -> Documents:
        """The same, from one right-padded batch, which causal attention needs no mask for."""
        rows = nn.utils.rnn.pad_sequence(self.tokens, batch_first=True).to(self.device)
        logits = self.model(input_ids=rows, use_cache=False).logits
        return [row[:length] for row, length in zip(logits, self.lengths, strict=True)]

    def backward(self, logits: Sequence[torch.Tensor], documents: Sequence[int], *, sign: float = 1.0) -> None:
        """Add the gradient of a fixed random weighting of these documents' logits, or take it away."""
        losses = []
        for document, logits_LV in zip(documents, logits, strict=True):
            generator = torch.Generator().manual_seed(self.seed + 1 + document)
            weights = torch.randn(logits_LV.shape[-1], generator=generator) / logits_LV.shape[-1] ** 0.5
            losses.append((logits_LV.float() * weights.to(logits_LV.device)).sum())
        with torch.autocast(self.device.type, enabled=False):  # as the Trainer's backward runs
            (sign * torch.stack(losses).sum()).backward()

    def loss(self, logits: Documents) -> float:
        """Mean loss of the documents' logits under the labels that the collator makes."""
        labels = self.collator(_examples(self.tokens))["labels"].flatten().to(self.device)
        losses = nn.functional.cross_entropy(
            torch.cat(logits)[:-1].float(), labels[1 : sum(self.lengths)], ignore_index=-100
        )
        return float(losses)

    def loss_alone(self, logits: Documents) -> float:
        """Mean loss of the documents' logits, each predicting its own next tokens."""
        own = [(x[:-1], ids[1:].to(self.device)) for x, ids in zip(logits, self.tokens, strict=True)]
        predicted, ids = (torch.cat(part) for part in zip(*own, strict=True))
        return float(nn.functional.cross_entropy(predicted.float(), ids))

    def embedding_gradients(self, tokens: Documents) -> Documents | None:
        """Gradients `(length, D)` of each document's embeddings, packed; `None` where the model embeds otherwise.

        Parameters get no gradients.
        """
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            with self._embedded() as outputs:
                logits = self.packed(tokens)
                if not any(t.requires_grad for t in logits):
                    return None
                self.backward(logits, range(len(logits)))
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
        shape = (1, self.layout.num_tokens)
        if len(outputs) != 1 or outputs[0].shape[:2] != shape or outputs[0].grad is None:
            return None
        return self._split(outputs[0].grad)

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

    def outputs_packed(self, tokens: Documents) -> dict[str, Documents]:
        """Every module's per-token output, by document, in the order in which modules finish."""
        return {
            name: self._split(output)
            for name, output in self._outputs(lambda: self.packed(tokens), (1, self.layout.num_tokens))
        }

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

    def _split(self, tensor: torch.Tensor) -> Documents:
        return list(self.layout.split(tensor)[: len(self.lengths)])

    def _batch(self, tokens: Documents) -> dict[str, Any]:
        batch = self.collator(_examples(tokens))
        del batch["labels"]
        return {k: v.to(self.device) if hasattr(v, "to") else v for k, v in batch.items()}


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
