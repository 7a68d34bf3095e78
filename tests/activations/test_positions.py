"""Positions: names to tokens, through chat templates that add, trim, repeat and alter, and several kinds of tokenizer."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from activations.capturing import Plan, capture
from activations.errors import StoreError
from activations.model import Model, from_modules
from activations.positions import Conversation, Span, canonical, resolve
from activations.prompts import Prompt, encode
from tests import tiny_models as tiny

CONTENT = "Łukasz is taller than Zoë 🙂.\n\nIs Zoë taller than Łukasz? Answer."
PLAIN = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|>{% endfor %}<|assistant|>"
PREAMBLE = (
    "{% if messages[0].role != 'system' %}<|system|> Zoë taller than Łukasz? You are a helpful Answer. <|end|>{% endif %}"
    + PLAIN
)
TRIMMED = PREAMBLE.replace("m.content", "m.content | trim")
SPANS = (
    Span("premise:0", 0, CONTENT.index("\n")),
    Span("name:Zoë", CONTENT.index("Zoë"), CONTENT.index("Zoë") + 3),
    Span("smile", CONTENT.index("🙂"), CONTENT.index("🙂") + 1),
    Span("query", CONTENT.index("Is"), CONTENT.index("?") + 1),
)


def byte_level(template: str, prefix: bool = False) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    raw.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["Is taller than Answer helpful You are", "taller than"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", chat_template=template)


def word_level(template: str) -> PreTrainedTokenizerFast:
    words = re.findall(r"\w+|[^\w\s]", CONTENT + " You are a helpful <|end|> x | system user assistant <")
    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(dict.fromkeys(words))}, unk_token="x"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<", chat_template=template)


def metaspace(template: str) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.Unigram([("<unk>", 0.0), *((c, -5.0) for c in sorted(set(CONTENT + "▁Yourhelpf<>|msytu"))),
                                    ("▁taller", -3.0), ("▁than", -3.0)], unk_id=0))  # fmt: skip
    raw.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<unk>", chat_template=template)


KINDS = {"bytes": byte_level, "prefixed": lambda t: byte_level(t, prefix=True), "words": word_level, "meta": metaspace}


def found(tokenizer: Any, messages: list[dict[str, str]], spans: Any, *positions: str) -> list[tuple[str, str]]:
    """Label and text of each row, the text decoded by the tokenizer itself."""
    prompt = encode(tokenizer, [messages])[0]
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    rows = resolve(model, [prompt], positions, [Conversation(messages, spans)])[0]
    return [(spot.label, tokenizer.decode([prompt.ids[n] for n in spot.tokens])) for spot in rows]


@pytest.mark.parametrize("template", [PLAIN, PREAMBLE, TRIMMED])
@pytest.mark.parametrize("kind", list(KINDS))
def test_spans_cover_their_own_words(kind: str, template: str) -> None:
    tokenizer = KINDS[kind](template)
    messages = [{"role": "user", "content": CONTENT}]
    positions = [f"{span.label}/mean" for span in SPANS]
    squeezed = lambda text: re.sub(r"[\s▁]|<unk>", "", text)  # noqa: E731
    for (label, text), span in zip(found(tokenizer, messages, SPANS, *positions), SPANS, strict=True):
        assert label == f"{span.label}/mean"
        assert squeezed(text) == squeezed(CONTENT[span.start : span.end])


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_token_and_the_last_one(kind: str) -> None:
    tokenizer = KINDS[kind](PREAMBLE)
    messages = [{"role": "user", "content": CONTENT}]
    rows = found(tokenizer, messages, SPANS, "query/all", "query", "answer")
    query = rows[:-2]
    assert [label for label, _ in query] == [f"query/{n}" for n in range(len(query))]
    assert rows[-2] == ("query", query[-1][1])
    assert query[-1][1].strip() == "?"
    assert rows[-1][0] == "answer"


def test_character_cut_into_bytes_keeps_all_of_them() -> None:
    tokenizer = byte_level(PLAIN)
    prompt = encode(tokenizer, [[{"role": "user", "content": CONTENT}]])[0]
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    rows = resolve(model, [prompt], ["smile/all"], [Conversation([{"role": "user", "content": CONTENT}], SPANS)])[0]
    assert 4 <= len(rows) <= 5  # four bytes, and a space before them
    assert "🙂" in tokenizer.decode([prompt.ids[spot.position] for spot in rows])


def test_message_that_stands_twice_is_found_by_its_place() -> None:
    """The same words in the system message and in the question: a search for the text would find the first."""
    messages = [{"role": "system", "content": "Is Zoë taller"}, {"role": "user", "content": "Is Zoë taller"}]
    for kind in ("bytes", "words"):
        tokenizer = KINDS[kind](PLAIN)
        prompt = encode(tokenizer, [messages])[0]
        model: Any = SimpleNamespace(tokenizer=tokenizer)
        spans = [Span("one", 3, 6, 0), Span("two", 3, 6, 1)]
        one, two = resolve(model, [prompt], ["one", "two"], [Conversation(messages, spans)])[0]
        again = encode(tokenizer, [messages[:1]])[0]
        assert one.position < len(again.ids) < two.position
        assert prompt.ids[one.position] == prompt.ids[two.position]


def test_system_message_put_into_the_first_turn() -> None:
    merged = (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|> "
        "{{ (system + '\\n\\n' + m.content) if loop.first else m.content }} <|end|>{% endfor %}<|assistant|>"
    )
    messages = [{"role": "system", "content": "You are helpful"}, {"role": "user", "content": CONTENT}]
    spans = [Span("who", 0, 3, 0), *(span._replace(message=1) for span in SPANS)]
    rows = dict(found(byte_level(merged), messages, spans, "who/mean", "query/mean"))
    assert rows["who/mean"].strip() == "You"
    assert rows["query/mean"].strip() == CONTENT[SPANS[-1].start : SPANS[-1].end]


def test_trimmed_message_shifts_its_spans() -> None:
    content = f"  \n {CONTENT} \n"
    moved = [span._replace(start=span.start + 4, end=span.end + 4) for span in SPANS]
    messages = [{"role": "user", "content": content}]
    for template in (PREAMBLE, TRIMMED):
        rows = dict(found(byte_level(template), messages, moved, "query/mean", "smile/mean"))
        assert rows["query/mean"].strip() == "Is Zoë taller than Łukasz?"
        assert rows["smile/mean"].strip() == "🙂"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (PLAIN.replace("m.content }}", "m.content }} {{ m.content }}"), "shows it 2 times; name no span of it"),
        (PLAIN.replace("m.content", "m.content | upper"), "the chat template alters it"),
        (PLAIN.replace("m.content", "m.content.split('\\n')[0]"), "the chat template alters it"),
        (PLAIN.replace("{{ m.content }}", "is"), "leaves it out"),
    ],
)
def test_repeated_and_altered_messages_are_refused(template: str, words: str) -> None:
    with pytest.raises(StoreError, match=r"^prompt 0: message 0 \('Łukasz is taller") as caught:
        found(byte_level(template), [{"role": "user", "content": CONTENT}], SPANS, "query")
    assert words in str(caught.value)


def test_prompt_of_other_messages_is_refused() -> None:
    tokenizer = byte_level(PLAIN)
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    prompt = encode(tokenizer, [[{"role": "user", "content": CONTENT + " Is"}]])[0]
    with pytest.raises(StoreError, match="the prompt was made from other messages"):
        resolve(model, [prompt], ["query"], [Conversation([{"role": "user", "content": CONTENT}], SPANS)])


def test_span_that_is_gone_is_named() -> None:
    """White space that the template trims, and characters that the normalizer drops."""
    content = "  \t Is Zoë tall"
    with pytest.raises(StoreError, match=r"prompt 0: nothing is left of span 'gap' \('  '\) after the chat template"):
        found(byte_level(TRIMMED), [{"role": "user", "content": content}], [Span("gap", 0, 2)], "gap")
    raw = Tokenizer(models.WordLevel({"<": 0, "Is": 1, "tall": 2, ">": 3}, unk_token="<"))
    raw.normalizer = normalizers.Replace("Zoë", "")
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+"), behavior="removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template="{{ messages[0].content }}")
    with pytest.raises(StoreError, match=r"nothing is left of span 'name' \('Zoë'\)"):
        found(tokenizer, [{"role": "user", "content": "Is Zoë tall"}], [Span("name", 3, 6)], "name")


@pytest.mark.parametrize(
    ("spans", "position", "words"),
    [
        (
            SPANS,
            "premise:7",
            "prompt 0 has no span 'premise:7'; it has premise:0, …; name a span that every prompt has",
        ),
        ((), "query", "it has no spans"),
        ((SPANS[0], SPANS[0]), "premise:0", "prompt 0 has 2 spans called 'premise:0'"),
        ((Span("q", 3, 999),), "q", "is characters 3 to 999 of a message of"),
        ((Span("q", 0, 3, 2),), "q", "is in message 2, and there are 1"),
        (SPANS, "index:99999", "prompt 0 has no token 99999"),
        (SPANS, "-99999", "prompt 0 has no token -99999"),
    ],
)
def test_bad_positions_are_named(spans: Any, position: str, words: str) -> None:
    with pytest.raises(StoreError) as caught:
        found(byte_level(PLAIN), [{"role": "user", "content": CONTENT}], spans, position)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_writing_positions() -> None:
    given: list[str | int] = ["answer", 5, "-2", "index:07", "query", "query/last", "premise:17/mean", "name:Ann/all"]
    expected = ["answer", "index:5", "index:-2", "index:7", "query", "query", "premise:17/mean", "name:Ann/all"]
    assert [canonical(one) for one in given] == expected
    for bad in ("", "index:x", "index:", "a/b", "query/median", "answer/mean", "index:3/all", "/mean"):
        with pytest.raises(StoreError, match="position"):
            canonical(bad)


def test_spans_need_conversations() -> None:
    model: Any = SimpleNamespace(tokenizer=None)
    prompts = [Prompt((1, 2, 3), "")] * 2
    with pytest.raises(StoreError, match="position query is a span, and no spans were given"):
        resolve(model, prompts, ["answer", "query"])
    with pytest.raises(StoreError, match="1 conversations for 2 prompts"):
        resolve(model, prompts, ["query"], [Conversation([])])
    assert [spot.position for spot in resolve(model, prompts, ["answer", "0", "-1", "-3"])[1]] == [2, 0, 2, 0]


SENTENCES = (
    "Is Bob taller than Cara ?",
    "Amy is older than Bob . Dan is not older . Is Amy taller ?",
    "Is Eve older ?",
)


@pytest.fixture(scope="module")
def model() -> Model:
    return from_modules(*tiny.tiny_llama())


def asked(model: Model) -> tuple[list[Prompt], list[Conversation]]:
    made = []
    for n, text in enumerate(SENTENCES):
        start = text.rindex("Is")
        system = [{"role": "system", "content": "Answer yes or no"}] if n == 1 else []
        messages = [*system, {"role": "user", "content": text}]
        made.append(Conversation(messages, [Span("query", start, len(text), len(system))]))
    return model.encode([one.messages for one in made]), made


def states(model: Model, prompt: Prompt) -> list[torch.Tensor]:
    """transformers' own hidden states of the unpadded prompt; the last block's from a hook, before the norm."""
    kept: list[torch.Tensor] = []
    block = model.module(model.structure.blocks[-1])
    handle = block.register_forward_hook(lambda m, a, o: kept.append(o[0] if isinstance(o, tuple) else o))
    with torch.inference_mode():
        out = model.hf_model(input_ids=torch.tensor([prompt.ids]), use_cache=False, output_hidden_states=True)
    handle.remove()
    return [*(state[0] for state in out.hidden_states[1:-1]), kept[0][0]]


@pytest.mark.parametrize("batch_tokens", [1, 8192])
def test_rows_are_the_tokens_of_single_prompts(model: Model, tmp_path: Path, batch_tokens: int) -> None:
    prompts, spans = asked(model)
    positions = ("answer", "query", "query/mean", "query/all", "1", "-3")
    plan = Plan(positions=positions, batch_tokens=batch_tokens)
    store = capture(model, prompts, plan, tmp_path / "s", spans=spans, index=[(f"k{n}", "original") for n in range(3)])
    row = 0
    rows = store.manifest["rows"]
    for n, prompt in enumerate(prompts):
        words = [model.tokenizer.decode([token]) for token in prompt.ids]
        start = len(words) - 1 - words[::-1].index("Is")
        stop = len(words) - words[::-1].index("?")
        single = states(model, prompt)
        tokens = list(range(start, stop))
        expected = [[len(words) - 1], tokens[-1:], tokens, *([token] for token in tokens), [1], [len(words) - 3]]
        labels = ["answer", "query", "query/mean", *(f"query/{i}" for i in range(len(tokens))), "index:1", "index:-3"]
        for label, wanted in zip(labels, expected, strict=True):
            for layer in range(model.n_layers):
                mean = single[layer][wanted].mean(0).numpy()
                np.testing.assert_allclose(store["resid_post", layer][row], mean, atol=5e-5, err_msg=f"{n} {label}")
            assert rows["position"][row] == (-1 if label == "query/mean" else wanted[0])
            assert (rows["key"][row], rows["n_tokens"][row]) == (f"k{n}", len(prompt.ids))
            row += 1
    assert row == len(store) == plan.n_rows(model, prompts, spans)
    assert store.manifest["content"]["positions"] == [canonical(one) for one in positions]


def test_several_positions_resume_and_keep_the_readout(model: Model, tmp_path: Path) -> None:
    from activations.readout import answer_tokens, read

    prompts, spans = asked(model)
    answers = answer_tokens(model, tiny.ANSWERS)
    plan = Plan(positions=("query/mean", "index:0"), batch_tokens=24)
    whole = capture(model, prompts, plan, tmp_path / "a", spans=spans, answers=answers)
    for path in sorted((tmp_path / "a").glob("shard-*.h5"))[1:]:
        path.unlink()
    again = capture(model, prompts, plan, tmp_path / "a", spans=spans, answers=answers)
    np.testing.assert_array_equal(whole["resid_post", 1], again["resid_post", 1])
    # The readout stays the one at the answer, beside each of a prompt's rows.
    expected = read(model, prompts, answers, batch_tokens=24).logit.numpy().repeat(2, axis=0)
    np.testing.assert_array_equal(again.readout["logit"], expected)
    with pytest.raises(StoreError, match="positions"):
        capture(model, prompts, Plan(positions=("index:0", "query/mean"), batch_tokens=24), tmp_path / "a", spans=spans,
                answers=answers)  # fmt: skip


def test_means_of_half_precision_are_taken_in_float32(tmp_path: Path) -> None:
    hf_model, tokenizer = tiny.tiny_llama()
    model = from_modules(hf_model.to(torch.bfloat16), tokenizer)
    prompts, spans = asked(model)
    store = capture(model, prompts, Plan(positions=("query/mean",)), tmp_path / "a", spans=spans)
    rows = capture(model, prompts, Plan(positions=("query/all",)), tmp_path / "b", spans=spans)
    keys = np.array(rows.manifest["rows"]["key"])
    for n in range(3):
        mean = rows["resid_post", 0][keys == str(n)].mean(axis=0, dtype=np.float32)
        np.testing.assert_allclose(store["resid_post", 0][n], mean, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(mean, torch.tensor(mean).bfloat16().float().numpy())  # rounding would have shown


def test_failing_prompt_is_named_with_its_key(model: Model, tmp_path: Path) -> None:
    prompts, spans = asked(model)
    spans[1] = Conversation(spans[1].messages, [])
    index = [(f"key{n}", "original") for n in range(3)]
    with pytest.raises(StoreError, match=r"prompt 1 \(key1 original\) has no span 'query'"):
        capture(model, prompts, Plan(positions=("query",)), tmp_path / "s", spans=spans, index=index)
    assert not (tmp_path / "s").exists()
    long = Prompt(prompts[0].ids * 30, "")
    with pytest.raises(StoreError, match=r"prompt 1 has 3\d\d tokens and in-memory reads at most 128"):
        capture(model, [prompts[0], long], Plan(), tmp_path / "s")


@pytest.mark.parametrize("library", ["transformer_lens", "nnsight"])
def test_other_libraries_give_the_same_store(model: Model, tmp_path: Path, library: str) -> None:
    from activations.errors import ModelError
    from activations.readout import answer_tokens

    prompts, spans = asked(model)
    answers = answer_tokens(model, tiny.ANSWERS)
    plan = Plan(sites=("resid_mid", "z"), positions=("answer", "query/mean", "query/all", "0"), batch_tokens=40)
    ours = capture(model, prompts, plan, tmp_path / "hf", spans=spans, answers=answers)
    theirs = capture(model, prompts, plan, tmp_path / library, spans=spans, answers=answers, backend=library)
    for site in plan.sites:
        np.testing.assert_allclose(theirs.stack(site), ours.stack(site), atol=5e-5)
    for name in ("logit", "logsumexp", "top"):
        np.testing.assert_allclose(theirs.readout[name], ours.readout[name], atol=5e-5)
    assert theirs.manifest["content"]["backend"] == library
    with pytest.raises(ModelError, match=f"backend {library} cannot give pattern of layer 0"):
        capture(model, prompts, Plan(sites=("pattern",)), tmp_path / "p", backend=library)
    with pytest.raises(ModelError, match="no backend 'vllm'; use hf"):
        capture(model, prompts, plan, tmp_path / "q", spans=spans, backend="vllm")
    assert not list(tmp_path.glob("[pq]/*"))
