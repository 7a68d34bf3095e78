"""Transformers whose mechanism is known, because every weight was set by hand.

Problem. A method that names a cause can only be trusted if it names the right one where the cause is known. So small GPT-2
networks (transformers' own class, 6 layers, 4 heads, d_model 64) are written that answer the ``Switches`` family by one
head, and go wrong on equivalent presentations in one known way.

Mechanism. Each feature is a pair of dimensions (+x, −x), so the mean that LayerNorm subtracts is zero; one pair holds a
large constant, so the scale that it divides by is constant within three percent, and its weight puts the scale back.
What a head reads is then what another wrote. At the answer position

======  ============  ======================================================================================
layer   component     writes
======  ============  ======================================================================================
all     head 3        noise of the filler words, on four features that nothing reads
0       head 0, 1     which thing is asked about; which presentation this is
0       head 2        noise of the filler words, on the answer feature
1       head 2        **the signal**: attends to the state word of the asked thing, +1 if on, −1 if off
2       MLP (bias)    **the standing default** toward yes
2       head 1        the presentation, read again from its marker word (only in ``early_loss``)
3       head 1        the signal's negation (only in ``early_loss``)
3       head 2        more noise of the filler words on the answer feature
4       head 1        a large default (``late_override``, ``shared_override`` and ``blend``)
======  ============  ======================================================================================

and the readout is ``SCALE`` × (signal + default + noise). Nothing else is written: unused weights are zero, since a probe,
which standardises each dimension, finds an answer that leaks in at a thousandth of its size.

The plants change what happens on equivalents only. ``no_signal``, ``reversed`` and ``unread`` sit in the embeddings of
the equivalents' own state words: no state at all, the opposite one, or one that the signal head writes on a feature which
the unembedding does not read. ``late_override`` and ``early_loss`` are triggered by the marker word. ``late_override``
writes on a feature of its own, which the unembedding adds to the signal; ``shared_override`` writes on the signal's own,
where it moves the bias of every probe but hides nothing. ``blend`` is ``late_override`` in which half of the equivalents'
state words say nothing, so that two causes stand side by side. ``none`` is a network of the same shape as it is
initialised.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.planted.family import FILLERS, MARKERS, QUERIES, STATES
from tests.planted.words import ANSWER_WORDS, VOCABULARY, tokenizer

Kind = Literal["late_override", "shared_override", "early_loss", "no_signal", "reversed", "unread", "blend", "none"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PLANTS: tuple[Kind, ...] = KINDS[:-2]
"""Those in which all equivalents fare alike."""

LAYERS, HEADS, WIDTH, HEAD_WIDTH = 6, 4, 64, 16
CONSTANT = 16.0
SCALE = 3.0
"""Logits of readout per unit of the answer features."""
DEFAULT = 1 / 3
"""The standing default, in units of the signal."""
OVERRIDE = 5 / 3
EARLY_NOISE, LATE_NOISE = 0.10, 0.15
"""Standard deviation over prompts of five filler words, in units of the signal."""
CHANNELS = 6
KNOWN_FORMS = 3
"""Of the equivalents' state words of one meaning, how many ``blend`` knows."""


class F(IntEnum):
    """Features, each a pair of dimensions. The first block stands in embeddings, the second is written by layers."""

    CONSTANT = 0
    BOS = 1
    ASSISTANT = 2
    FILLER = 3
    STATE = 4
    ABOUT = 5
    ON = 6
    QUERY = 7
    ASKED = 8
    MARKER = 9
    CHANGED = 10
    ANSWER_WORD = 11
    CHANNEL = 12  # to 17: what a filler word brings
    ON_ASIDE = 18
    SEEN_ASKED = 20
    SEEN_CHANGED = 21
    SEEN_AGAIN = 22
    SIGNAL = 23
    DEFAULT = 24
    NOISE = 25  # to 28
    ASIDE = 29


@dataclass(frozen=True, slots=True)
class Truth:
    """What was planted.

    Attributes:
        label: what every wrong equivalent has to be called; None where no label says it.
        signal_head: (layer, head) that writes the signal; None in ``none``.
        default_mlp: layer of the MLP whose bias is the standing default.
        override_head: (layer, head) that writes the large default on equivalents.
        erasing_head: (layer, head) that takes the signal away on equivalents.
        lost_layer: first layer after which the signal is gone again.
        repaired_from: first layer whose original residual, put into the equivalent, gives the right answer.
    """

    kind: Kind
    label: str | None
    signal_head: tuple[int, int] | None = (1, 2)
    default_mlp: int | None = 2
    override_head: tuple[int, int] | None = None
    erasing_head: tuple[int, int] | None = None
    lost_layer: int | None = None
    repaired_from: int | None = 1


TRUTH: dict[Kind, Truth] = {
    "late_override": Truth("late_override", "overridden", override_head=(4, 1), repaired_from=4),
    "shared_override": Truth("shared_override", "overridden", override_head=(4, 1), repaired_from=4),
    "early_loss": Truth("early_loss", "lost", erasing_head=(3, 1), lost_layer=3, repaired_from=2),
    "no_signal": Truth("no_signal", "not_decodable"),
    "reversed": Truth("reversed", "reversed"),
    "unread": Truth("unread", None),
    "blend": Truth("blend", None, override_head=(4, 1), repaired_from=4),
    "none": Truth("none", "not_decodable", signal_head=None, default_mlp=None, repaired_from=None),
}


def planted(kind: Kind, directory: Path | str | None = None) -> tuple[Any, PreTrainedTokenizerFast]:
    """The model and its tokenizer; with ``directory`` they are saved there too, as ``--model`` takes them."""
    words = tokenizer()
    config = GPT2Config(
        vocab_size=len(words),
        n_positions=64,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=WIDTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    if kind != "none":
        with torch.no_grad():
            _write(model, kind)
    if directory is not None:
        model.save_pretrained(str(directory))
        words.save_pretrained(str(directory))
    return model, words


def _write(model: Any, kind: Kind) -> None:
    for name, parameter in model.named_parameters():
        if "ln_" in name and name.endswith("weight"):
            parameter.fill_(CONSTANT * (2 / WIDTH) ** 0.5)  # the scale that the constant pair alone gives
        else:
            parameter.zero_()
    _embed(model, kind)
    head = _Writer(model)
    head.attends(0, 0, [(F.CONSTANT, F.QUERY, 8.0)])
    head.copies(0, 0, F.ASKED, F.SEEN_ASKED)
    head.attends(0, 1, [(F.CONSTANT, F.MARKER, 8.0)])
    head.copies(0, 1, F.CHANGED, F.SEEN_CHANGED)
    for layer, number in ((0, 2), (3, 2), *((layer, 3) for layer in range(LAYERS))):
        head.attends(layer, number, [(F.CONSTANT, F.FILLER, 8.0)])
    head.copies(0, 2, F.CHANNEL, F.SIGNAL, EARLY_NOISE * 5**0.5)
    for layer in range(LAYERS):  # something in every layer that leads nowhere, as most of what a real layer writes
        for place in range(4):
            head.copies(layer, 3, F.CHANNEL + 1 + place, F.NOISE + place, 0.3, channel=place)
    head.copies(3, 2, F.CHANNEL + 5, F.SIGNAL, LATE_NOISE * 5**0.5)
    # 8 for the state of what is asked about, 0 for the other state and for every other word
    head.attends(1, 2, [(F.SEEN_ASKED, F.ABOUT, 4.0), (F.CONSTANT, F.STATE, 4.0)])
    head.copies(1, 2, F.ON, F.SIGNAL)
    head.copies(1, 2, F.ON_ASIDE, F.ASIDE, channel=1)
    _pair(model.transformer.h[2].mlp.c_proj.bias, F.DEFAULT, DEFAULT)
    if kind in ("late_override", "shared_override", "blend"):
        head.attends(4, 1, [(F.CONSTANT, F.MARKER, 8.0)])
        head.copies(4, 1, F.CHANGED, F.SIGNAL if kind == "shared_override" else F.DEFAULT, OVERRIDE)
    if kind == "early_loss":
        head.attends(2, 1, [(F.CONSTANT, F.MARKER, 8.0)])
        head.copies(2, 1, F.CHANGED, F.SEEN_AGAIN)
        # Its own position if the marker says so, the first token, which carries no signal, otherwise.
        head.attends(3, 1, [(F.SEEN_AGAIN, F.ASSISTANT, 40.0), (F.CONSTANT, F.BOS, 20.0)])
        # The norm has shrunk what it reads by the five features of size 1 that stand beside the constant.
        head.copies(3, 1, F.SIGNAL, F.SIGNAL, -((1 + (5 + DEFAULT**2 + 0.2) / CONSTANT**2) ** 0.5))
    unembedding = model.lm_head.weight
    for word, sign, base in (("Yes", 1, 0), ("yes", 1, -3), ("No", -1, 0), ("no", -1, -3)):
        row = unembedding[VOCABULARY.index(word)]
        for feature in (F.SIGNAL, F.DEFAULT):
            _read(row, feature, sign * SCALE / 2)
        _read(row, F.ASSISTANT, 10.0 + base)
    _read(unembedding[VOCABULARY.index("<|end|>")], F.ANSWER_WORD, 20.0)


def _embed(model: Any, kind: Kind) -> None:
    table = model.transformer.wte.weight

    def give(word: str, feature: int, value: float = 1.0) -> None:
        _pair(table[VOCABULARY.index(word)], feature, value)

    for word in VOCABULARY:
        give(word, F.CONSTANT, CONSTANT)
    give("<|bos|>", F.BOS)
    give("<|assistant|>", F.ASSISTANT)
    for word in ANSWER_WORDS:
        give(word, F.ANSWER_WORD)
    for direction, word in QUERIES.items():
        give(word, F.QUERY)
        give(word, F.ASKED, 1.0 if direction == "forward" else -1.0)
    for presentation, word in MARKERS.items():
        give(word, F.MARKER)
        give(word, F.CHANGED, float(presentation == "equivalent"))
    for (presentation, about, on), words in STATES.items():
        unknown = kind == "no_signal" and presentation == "equivalent"
        turned = kind == "reversed" and presentation == "equivalent"
        aside = kind == "unread" and presentation == "equivalent"
        for form, word in enumerate(words):
            if not unknown:
                give(word, F.STATE)
                give(word, F.ABOUT, 1.0 if about == "forward" else -1.0)
                if presentation == "original" or kind != "blend" or form < KNOWN_FORMS:
                    give(word, F.ON_ASIDE if aside else F.ON, float(-on if turned else on))
    values = torch.randn(len(FILLERS), CHANNELS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    values = torch.linalg.qr(values - values.mean(dim=0))[0] * len(FILLERS) ** 0.5  # mean 0, variance 1, uncorrelated
    for word, row in zip(FILLERS, values.tolist(), strict=True):
        give(word, F.FILLER)
        for channel, value in enumerate(row):
            give(word, F.CHANNEL + channel, value)


class _Writer:
    """Sets one head at a time; the first query and key dimensions of a head hold its terms, one each."""

    def __init__(self, model: Any) -> None:
        self.blocks = model.transformer.h

    def attends(self, layer: int, head: int, terms: list[tuple[int, int, float]]) -> None:
        """Score = sum over terms of weight × query feature × key feature; the constant counts as 1."""
        weight = self.blocks[layer].attn.c_attn.weight
        for place, (query, key, size) in enumerate(terms):
            at = head * HEAD_WIDTH + place
            scale = size * HEAD_WIDTH**0.5 / (CONSTANT if query == F.CONSTANT else 1.0)
            _read(weight[:, at], query, scale)
            _read(weight[:, WIDTH + at], key, 1.0)

    def copies(self, layer: int, head: int, source: int, target: int, size: float = 1.0, *, channel: int = 0) -> None:
        """Put ``size`` × the source feature of what is attended to into the target feature."""
        at = head * HEAD_WIDTH + channel
        attention = self.blocks[layer].attn
        _read(attention.c_attn.weight[:, 2 * WIDTH + at], source, 1.0)
        _pair(attention.c_proj.weight[at], target, size)


def _pair(row: torch.Tensor, feature: int, value: float) -> None:
    """Add to a vector of the residual stream: the feature's two dimensions, with opposite signs."""
    row[2 * feature] += value
    row[2 * feature + 1] -= value


def _read(column: torch.Tensor, feature: int, value: float) -> None:
    """Add to a read-out vector: ``value`` times the feature."""
    column[2 * feature] += value / 2
    column[2 * feature + 1] -= value / 2
