"""Direct-path patching against a network whose other parts are held by hooks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from activations import answer_tokens, from_modules, read
from activations.additions import additions
from activations.structure import first, hooks
from patching import Cell, Edit, PatchError, direct_effects, head_cells, head_map, head_set_cell, layer_cells, sweep
from patching.direct_path import answer_rows
from tests.tiny_models import ANSWERS, BUILDERS, MESSAGES, tiny_adapter, tiny_gpt2, tiny_llama

# Blocks whose two parts are the outputs of two modules: there all else can be held by hooks.
HELD = (
    "llama",
    "qwen3",
    "gpt2",
    "gemma2",
    "neox",
    "moe",
    "hybrid",
    "cohere",
    "mistral",
    "qwen2",
    "gemma3",
    "olmo2",
    "phi3",
)


def ready(build):
    model = from_modules(*build())
    return model, model.encode(MESSAGES), answer_tokens(model, ANSWERS)


def by_force(model, prompt, answers, edits, donor):
    """The readout of one unpadded prompt with heads replaced and every other addition held at its old value."""
    structure, ids = model.structure, torch.tensor([prompt.ids])
    old: dict[str, torch.Tensor] = {}
    edited = {edit.layer for edit in edits}

    def keep(name):
        def after(module, args, output):
            old[name] = first(output).clone()

        return after

    def hold(name):
        def after(module, args, output):
            return (old[name], *output[1:]) if isinstance(output, tuple) else old[name]

        return after

    def replaced(layer):
        def before(module, args):
            z = args[0].clone()
            heads = z[:, -1].view(model.heads(layer), -1)
            for edit in edits:
                if edit.layer == layer:
                    value = 0 if edit.source == "zero" else torch.from_numpy(donor[layer]).view_as(heads)[edit.head]
                    heads[edit.head] = value
            return (z, *args[1:])

        return before

    # The mixer's inputs too: an edited layer above another must not see what the lower one changed.
    names = [name for name in (*structure.attn_out, *structure.mlp_out) if name]
    with torch.no_grad():
        with hooks([model.module(name).register_forward_hook(keep(name)) for name in names]):
            model.hf_model(input_ids=ids)
        kept_z: dict[int, torch.Tensor] = {}

        def note(layer):
            def before(module, args):
                kept_z[layer] = args[0].clone()

            return before

        outs = {layer: model.module(structure.out_projections[layer]) for layer in edited}
        with hooks([module.register_forward_pre_hook(note(layer)) for layer, module in outs.items()]):
            model.hf_model(input_ids=ids)

        def own_z(layer):
            def before(module, args):
                return (kept_z[layer], *args[1:])

            return before

        free = {structure.attn_out[layer] for layer in edited}
        handles = [model.module(name).register_forward_hook(hold(name)) for name in names if name not in free]
        for layer, module in outs.items():
            handles.append(module.register_forward_pre_hook(own_z(layer)))
            handles.append(module.register_forward_pre_hook(replaced(layer)))
        with hooks(handles):
            logits = model.hf_model(input_ids=ids).logits[0, -1].double()
    yes, no = (logits[list(tokens)].logsumexp(0) for tokens in answers.ids)
    return float(yes - no)


@pytest.mark.parametrize("name", HELD)
def test_it_is_what_hooks_that_hold_everything_else_give(name):
    model, prompts, answers = ready(BUILDERS[name])
    heads = head_map(model)
    cells = [
        *head_cells(heads),
        *[Cell(cell.name + " other", cell.edits) for cell in head_cells(heads, source="other")],
        head_set_cell("several", [(layer, 1) for layer, count in enumerate(heads) if count]),
    ]
    own = answer_rows(model, prompts, cells)
    other = {layer: np.roll(rows, 1, axis=0) for layer, rows in own["z"].items()}
    found = direct_effects(model, own, cells, answers=answers, donors={"other": {"z": other}})
    np.testing.assert_allclose(found.unpatched, read(model, prompts, answers).difference.numpy(), atol=2e-5)
    some = [*range(0, len(cells), 5), len(cells) - 1]
    for item, prompt in enumerate(prompts[:2]):
        mine = {layer: rows[item] for layer, rows in other.items()}
        for column in some:
            wanted = by_force(model, prompt, answers, cells[column].edits, mine)
            assert found.difference[item, column] == pytest.approx(wanted, abs=3e-5)
    assert np.abs(found.difference - found.unpatched[:, None]).max() > 1e-2


def test_at_the_last_layer_the_direct_path_is_all_there_is_but_for_the_mlp():
    """A parallel block's MLP does not read its attention, so its last layer has no other way."""
    model, prompts, answers = ready(BUILDERS["neox"])
    last = model.n_layers - 1
    cells = [cell for cell in head_cells(head_map(model)) if cell.edits[0].layer == last]
    found = direct_effects(model, answer_rows(model, prompts, cells), cells, answers=answers)
    exact = sweep(model, prompts, cells, answers=answers, seed=0)
    np.testing.assert_allclose(found.difference, exact.difference, atol=2e-5)
    early = [cell for cell in head_cells(head_map(model)) if cell.edits[0].layer == 0]
    direct = direct_effects(model, answer_rows(model, prompts, early), early, answers=answers)
    whole = sweep(model, prompts, early, answers=answers, seed=0)
    assert np.abs(direct.difference - whole.difference).max() > 1e-2, "an early head is read by later layers too"


@pytest.mark.parametrize("name", [*HELD, "granite", "gemma4", "falcon", "qwen3_next", "gpt_oss"])
def test_the_frozen_variant_is_direct_logit_attribution(name):
    """With one token a label, zeroing a head takes away exactly what attribution credits it with."""
    from activations.contributions import components, required_sites, split_rows
    from activations.sites import named

    hf_model, tokenizer = BUILDERS[name]()
    if hasattr(hf_model.config, "final_logit_softcapping"):
        hf_model.config.final_logit_softcapping = None  # a softcap is not linear, and attribution makes it so
    model = from_modules(hf_model, tokenizer)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, {"yes": ("Yes",), "no": ("No",)})
    cells = [cell for cell in head_cells(head_map(model)) if additions(model)[cell.edits[0].layer].heads]
    found = direct_effects(model, answer_rows(model, prompts, cells), cells, answers=answers)
    rows = site_rows(model, prompts, [named(site) for site in required_sites(model)])
    values, readout = split_rows(model, answers, lambda site, layer: rows[site, layer])
    np.testing.assert_allclose(found.unpatched, readout.numpy(), atol=1e-4)
    heads = {
        (one.layer, one.head): value
        for one, value in zip(components(model), values, strict=False)
        if one.kind == "head"
    }
    for column, cell in enumerate(cells):
        edit = cell.edits[0]
        np.testing.assert_allclose(
            found.frozen[:, column] - found.unpatched, -heads[edit.layer, edit.head].numpy(), atol=2e-5
        )


def site_rows(model, prompts, places):
    """Rows at the answer position by the engine's own taps, padded: ``{(site, layer): [item, width]}``."""
    from activations.batching import forward_arguments, pad
    from activations.sites import choose
    from activations.taps import tapped

    chosen = {}
    for site, layer in places:
        chosen.update(choose(model, [site], None if layer is None else [layer]))
    padded = pad(prompts, model.device, model.pad_id)
    with torch.inference_mode(), tapped(model, chosen, len(prompts), torch.float32) as buffers:
        model.hf_model(**forward_arguments(model.hf_model, padded))
    return {where: rows for group, buffer in buffers.items() for where, rows in zip(group, buffer, strict=True)}


def test_real_and_frozen_norms_part_where_the_residual_changes_its_length():
    model, prompts, answers = ready(tiny_gpt2)
    cells = [head_set_cell("all", [(layer, head) for layer in range(3) for head in range(4)])]
    found = direct_effects(model, answer_rows(model, prompts, cells), cells, answers=answers)
    assert np.abs(found.difference - found.frozen).max() > 1e-2
    nothing = direct_effects(
        model,
        answer_rows(model, prompts, cells),
        [Cell("own", (Edit("z", 1, 2, "own"),))],
        answers=answers,
        donors={"own": {"z": answer_rows(model, prompts, cells)["z"]}},
    )
    np.testing.assert_allclose(nothing.difference[:, 0], nothing.unpatched, atol=1e-12)
    np.testing.assert_allclose(nothing.frozen[:, 0], nothing.unpatched, atol=1e-12)


def test_an_adapter_on_the_out_projection_counts(tmp_path):
    hf_model, tokenizer = tiny_llama()
    model = from_modules(hf_model, tokenizer)
    prompts, answers = model.encode(MESSAGES), answer_tokens(model, ANSWERS)
    name = model.attach(str(tiny_adapter(hf_model, tmp_path / "lora")), name="lora")
    cells = head_cells(head_map(model))
    with model.use(name):
        own = answer_rows(model, prompts, cells)
        found = direct_effects(model, own, cells, answers=answers)
        for column in (0, 7, 11):
            wanted = by_force(model, prompts[0], answers, cells[column].edits, {})
            assert found.difference[0, column] == pytest.approx(wanted, abs=3e-5)
    off = direct_effects(model, own, cells, answers=answers)
    assert np.abs(off.difference - found.difference).max() > 1e-3


def test_what_has_no_direct_path_is_refused_by_name():
    model, prompts, answers = ready(tiny_llama)
    cells = head_cells(head_map(model))
    own = answer_rows(model, prompts, cells)
    with pytest.raises(PatchError, match=r"edit resid_post\.0<-zero: a direct path is cut for replacements of z"):
        direct_effects(model, own, layer_cells(3, source="zero"), answers=answers)
    with pytest.raises(PatchError, match="at the answer position"):
        direct_effects(model, own, head_cells(head_map(model), position="all"), answers=answers)
    with pytest.raises(PatchError, match="hold no z of layer 2"):
        direct_effects(model, {**own, "z": {0: own["z"][0], 1: own["z"][1]}}, cells, answers=answers)
    with pytest.raises(PatchError, match=r"z of layer 1 has shape \[3, 32\]; \[4, 32\] is needed"):
        direct_effects(model, {**own, "z": {**own["z"], 1: own["z"][1][:3]}}, cells, answers=answers)
