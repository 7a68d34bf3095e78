"""What a run is asked to do.

One flat vocabulary: a YAML key, a ``--set key=value`` and, where there is one, a flag are the same word. Family
parameters stand under ``params``; ``--set n=4,8`` is short for ``--set params.n=4,8``. A list, where the family takes a
single value, means one setting for each element: ``n=4,8`` studies both sizes in one run.

The digest covers every key that can change a number. A run directory belongs to one digest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from experiments import recipes
from experiments.ablate_options import AblateSettings
from experiments.errors import UsageError
from experiments.patch_options import PatchSettings
from experiments.sections import Section
from tasks.contracts import Family
from tasks.parsing import PARSER_VERSION

FORMAT = 1
# What begins a word that only says which of several sections is meant; it is no key.
TAGGED = "of "
FOLDS, SPLITS = 5, 5


class ProbeSettings(Section):
    """Linear probes. Keys whose default depends on another are None where they don't apply, see ``check_probe``."""

    member: Literal["logistic", "ridge", "mean_difference"] = Field("logistic", description="kind of probe")
    # Beyond the bound the L2 term is lost in rounding: there is nothing left of a penalty.
    penalty: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] | None = Field(
        None, description="inverse L2 strength (scikit-learn's C); of several, inner folds choose"
    )
    inner_folds: int | None = Field(
        None, ge=2, le=20, description="folds that choose the penalty; the other folds in turn if not given"
    )
    target: tuple[str, ...] = Field(
        ("gold",),
        description="what probes are trained to read, beside gold, which the link needs: answer, correct, presentation, "
        "or what the family derives",
    )
    held_out: str | None = Field(
        None, min_length=1, description="swept parameter, or template, whose values folds hold out whole"
    )
    folds: int | None = Field(None, ge=2, le=20, description=f"folds, grouped by instance; {FOLDS} if not given")
    splits: int | None = Field(
        None, ge=1, le=100, description=f"ways of dealing the folds that vote on each failure; {SPLITS} if not given"
    )
    # With fewer than 19 no p could reach 0.05, below which a probe's verdicts are used.
    shuffles: int = Field(100, ge=19, le=10_000, description="refits with shuffled labels")
    threshold: float = Field(0.9, gt=0.5, lt=1, description="AUROC that counts as readable")

    @field_validator("penalty", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        several = tuple(value) if isinstance(value, (list, tuple)) else None if value is None else (value,)
        if several == ():
            raise PydanticCustomError("few", "give at least one")
        if several and len({str(one) for one in several}) != len(several):
            raise PydanticCustomError("twice", "give none twice")
        return several

    @field_validator("target", mode="before")
    @classmethod
    def _gold_first(cls, value: Any) -> Any:
        several = (value,) if isinstance(value, str) else value
        return tuple(dict.fromkeys(("gold", *several))) if isinstance(several, (list, tuple)) else value

    @model_validator(mode="after")
    def _fill(self) -> ProbeSettings:
        """Defaults that depend on other keys, spelled out: the digest covers what was done."""
        if self.penalty is None and self.member != "mean_difference":
            from probes.linear import PENALTIES

            object.__setattr__(self, "penalty", PENALTIES)
        if self.folds is None and self.held_out is None:
            object.__setattr__(self, "folds", FOLDS)
        if self.splits is None:
            object.__setattr__(self, "splits", SPLITS if self.held_out is None else 1)
        return self


class LensSettings(Section):
    """Reading layers through the unembedding."""

    tuned: bool = Field(False, description="train a tuned lens as well, on other folds than it reads")


class RunTable(Section):
    """The table that is printed at the end of a study and written to table.csv."""

    title: str = Field("Answers, default and signal, and where the answer is readable", min_length=1)
    rows: tuple[str, ...] | None = Field(
        None, description="parameters that tell rows apart; all that are swept if not given"
    )
    columns: tuple[Literal["accuracy", "yes_rate", "delta", "signal", "auroc", "first_layer"], ...] = Field(
        ("accuracy", "yes_rate", "delta", "signal", "first_layer"),
        min_length=1,
        description="each for both presentations",
    )


class Asking(Section):
    """What every command that asks a model needs to know."""

    command: ClassVar[str] = "run"  # the one whose run directory this configuration describes

    model: str = Field("builtin", min_length=1, description="hub id, folder, .gguf file, builtin or smollm2")
    adapter: tuple[str, ...] = Field((), description="adapters of the model: hub ids or folders")
    family: str = Field("ordering", min_length=1, description="problem family")
    params: dict[str, Any] = Field(default_factory=dict, description="family parameters; a list sweeps")
    limit: int | Literal["all"] = Field(100, description="matched sets a setting")  # bounds: see each command
    seed: int = Field(1, ge=0, description="seed of items, folds, shuffles, resamples and controls")
    split: Literal["train", "validation", "test"] = Field("test", description="split of the items")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("float32", description="weights are loaded as")
    batch_tokens: int = Field(8192, ge=1, description="padded tokens in a batch, at most")
    max_tokens: int = Field(20, ge=1, le=100_000, description="tokens of an answer, at most")
    resamples: int = Field(2000, ge=100, le=1_000_000, description="bootstrap resamples")
    max_unparsed: float = Field(0.5, ge=0, le=1, description="share of unread answers above which the exit code is 3")
    any_base: bool = Field(False, description="accept an adapter that names another base model")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")


class Config(Asking):
    """A whole study. Defaults study the built-in pair."""

    limit: int = Field(100, ge=8, le=1_000_000, description="matched sets a setting")
    store_dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="activations are kept as")
    probe: ProbeSettings = Field(default_factory=ProbeSettings)  # its own defaults are looked up when it is made
    lens: LensSettings = LensSettings()
    table: RunTable = RunTable()
    patch: PatchSettings = PatchSettings()
    ablate: AblateSettings = AblateSettings()


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the family's parameter grid."""

    label: str
    params: Mapping[str, Any]


AnyConfig = TypeVar("AnyConfig", bound=Asking)


def load(path: str | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> Config:
    """Configuration of a whole study: a file or the name of a recipe, then pairs, then flags; see ``load_as``."""
    return load_as(Config, None if path is None else recipes.found(path, Config.command), overrides, flags)


def load_as(kind: type[AnyConfig], path: str | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> AnyConfig:
    """Configuration from a YAML file, then ``--set`` pairs, then flags; later ones win.

    Args:
        kind: class of the configuration; its fields are the keys.

    Raises:
        UsageError: unknown key, bad value or unreadable file, named in one line.
    """
    values: dict[str, Any] = {}
    if path is not None:
        if not path.strip():  # as a path it would be the current directory
            raise UsageError(
                "the configuration's name is empty: give a YAML file or a recipe (see `probe recipes`), or leave it out"
            )
        values = _read_yaml(path)
        recipes.same_command(path, values.pop("command", None), kind.command)
    for pair in overrides:
        _set(values, pair, kind)
    values.update({key: value for key, value in flags.items() if value is not None})
    if values.get("params") is None:
        values["params"] = {}
    if not isinstance(values["params"], dict):
        raise UsageError(f"params is {values['params']!r}: give parameters and values, for example params: {{n: 8}}")
    if values.get("model", "builtin") == "builtin":
        # The built-in base comes with its adapter, and is asked only about names it knows.
        values.setdefault("adapter", ("builtin",))
        if values.get("family", "ordering") == "ordering":
            values["params"] = {"n": [4, 6, 8], "names": "builtin", **values["params"]}
    if isinstance(values.get("adapter"), str):
        values["adapter"] = (values["adapter"],)
    try:
        return kind(**values)
    except ValidationError as error:
        raise UsageError(_first_problem(error, kind)) from None
    except TypeError as error:
        raise UsageError(f"bad configuration: {error}; keys are {', '.join(kind.model_fields)}") from None


def settings(config: Asking, family: Family) -> list[Setting]:
    """The grid of family parameters that the run covers, validated by the family."""
    known = {parameter.name: parameter for parameter in family.parameters()}
    for key in config.params:
        if key not in known:
            close = get_close_matches(key, [*known, *type(config).model_fields], n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UsageError(
                f"unknown key {key!r}{hint}: configuration keys are {', '.join(type(config).model_fields)}; "
                f"parameters of {family.name} are {', '.join(known)}"
            )
    axes = {k: v for k, v in config.params.items() if isinstance(v, (list, tuple)) and not known[k].takes_list}
    for key, chosen in axes.items():
        if not chosen or len({str(value) for value in chosen}) != len(chosen):
            raise UsageError(f"{key} is {list(chosen)}: give at least one value and none twice")
    fixed = {key: value for key, value in config.params.items() if key not in axes}
    found = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        params = family.validate({**fixed, **point})
        # Without a sweep the one setting goes by the family's first parameter, its size.
        named = point or {name: params[name] for name in list(known)[:1]}
        found.append(Setting(", ".join(f"{key}={value}" for key, value in named.items()), params))
    return found


def resolved(config: Asking, family: Family, grid: Sequence[Setting]) -> dict[str, Any]:
    """Every value that decides the run's numbers, defaults filled in."""
    values = config.model_dump(mode="json")
    values["params"] = {setting.label: dict(setting.params) for setting in grid}
    return {
        "command": config.command,
        "format": FORMAT,
        "family_version": family.version,
        "parser_version": PARSER_VERSION,
        **values,
    }


def digest(values: Mapping[str, Any]) -> str:
    """sha256 over the resolved values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def config_text(config: Asking) -> str:
    """What a run directory keeps as config.yaml: the command, and every value it stands for."""
    return f"# {shlex.join(['probe', *sys.argv[1:]])}\n{yaml.safe_dump(config.model_dump(mode='json'))}"


def parse_pair(pair: str) -> tuple[str, Any]:
    """``key=value`` with the value read as YAML; commas make a list.

    Raises:
        UsageError: no ``=``, or a value that is no YAML.
    """
    key, equals, text = pair.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {pair!r} has no value: write key=value, for example n=4,8")
    try:
        if "," in text and not text.lstrip().startswith(("[", "{", '"', "'")):
            return key.strip(), [yaml.safe_load(part) for part in text.split(",") if part.strip()]
        return key.strip(), yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"--set {pair!r}: the value {text!r} can't be read as YAML; quote it") from None


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"can't read the configuration {path!r}: {error.strerror}; give a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = str(error).replace("\n", " ")
        raise UsageError(f"the configuration {path!r} is no YAML: {first}") from None
    if loaded is None:
        return {}
    try:
        json.dumps(loaded, default=str, skipkeys=True)
    except ValueError:
        raise UsageError(f"the configuration {path!r} refers to itself with an alias (*): write it out") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"the configuration {path!r} holds {type(loaded).__name__}: write `key: value` lines")
    return loaded


def _sections(kind: type[BaseModel]) -> dict[str, list[type[BaseModel]]]:
    """The keys of a configuration that hold keys of their own, and the sections that may stand there."""
    found: dict[str, list[type[BaseModel]]] = {}
    for name, field in kind.model_fields.items():
        parts = [field.annotation]
        while parts:
            part = parts.pop()
            if isinstance(part, type) and issubclass(part, BaseModel):
                found.setdefault(name, []).append(part)
            parts += get_args(part)
    return found


def _set(values: dict[str, Any], pair: str, kind: type[Asking]) -> None:
    key, value = parse_pair(pair)
    first, *rest = key.split(".")
    if not rest and first not in kind.model_fields:
        first, rest = "params", [key]
    if not rest:
        if first == "params":
            raise UsageError(f"--set {pair!r}: name the parameter, for example params.n=8")
        values[first] = value
        return
    section = values.get(first)
    if section is None:
        section = values[first] = {}
    sections = ("params", *_sections(kind))
    if len(rest) != 1 or not isinstance(section, dict) or first not in sections:
        raise UsageError(f"unknown key {key!r}: sections are {', '.join(sections)}, one level deep")
    section[rest[0]] = value


def _of(section: type[BaseModel]) -> Any:
    """What a section says that it counts, where several may stand in one place."""
    field = section.model_fields.get("of")
    return None if field is None else next(iter(get_args(field.annotation)), None)


# What pydantic says in words of Python.
_PLAINLY = {
    "tuple_type": "give a list, for example [a, b]",
    "model_type": "give keys and values, for example {key: value}",
    "dict_type": "give keys and values, for example {key: value}",
    "too_short": "give at least one",
    "too_long": "give two names, for example [original, equivalent]",
}


def _first_problem(error: ValidationError, kind: type[Asking]) -> str:
    # A wrong key comes first: with it the right one is missing, and that alone would be a riddle.
    problem = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    # A list is named without the place in it: `penalty.0` is no key.
    loc = problem["loc"]
    where = ".".join(str(part) for part in loc if not isinstance(part, int) and not str(part).startswith(TAGGED))
    if problem["type"] == "extra_forbidden":
        sections: list[type[BaseModel]] = [kind]
        for part in loc[:-1]:
            if str(part).startswith(TAGGED):
                sections = [one for one in sections if f"{TAGGED}{_of(one)}" == part]
            else:
                sections = _sections(sections[0]).get(str(part), sections)
        keys = list(sections[0].model_fields)
        close = get_close_matches(str(loc[-1]), keys, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"unknown key {where!r}{hint}: choose from {', '.join(keys)}"
    if problem["type"] == "missing":
        return f"{where} is missing: it has no default"
    said = _PLAINLY.get(problem["type"], f"{problem['msg'][0].lower()}{problem['msg'][1:]}")
    if problem["type"] == "union_tag_invalid":
        return f"{where}.of is {problem['input'].get('of')!r}: give pairs or answers"
    if isinstance(problem["input"], Mapping):  # a whole section would drown the message
        return f"{where}: {said}"
    if problem["input"] is None:
        return f"{where} is empty: give a value or leave it out ({said})"
    if isinstance(problem["input"], (list, tuple)) and problem["input"]:
        return f"{where} is {', '.join(map(str, problem['input']))}: {said}"
    return f"{where} is {problem['input']!r}: {said}"
