"""Flags made from dataclass fields: names, defaults and help stand in the dataclass alone."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from kv8.calibration.options import CALIBRATION_FIELDS, CalibrationOptions
from kv8.options import OPTION_FIELDS, EngineOptions
from kv8.sampling_params import SAMPLING_FIELDS, SamplingParams
from kv8.server.settings import SETTING_FIELDS, ServerSettings

ModelArgument = Annotated[str, typer.Argument(help=OPTION_FIELDS["model"].metadata["help"])]

# Flags of `kv8 serve` that vLLM spells in another way; both work.
VLLM_SPELLINGS = {"kv_cache_memory": "--kv-cache-memory-bytes"}

# Python has more ways to say these than a command line, which has one flag a field.
_ENGINE_TYPES: dict[str, Any] = {
    "kv_cache_dtype_skip_layers": list[str],
    "kv_scales": str | None,
    "kv_cache_memory": str | None,
}
LIST_FLAGS = frozenset({"--kv-cache-dtype-skip-layers", "--served-model-name"})
_SERVER_TYPES: dict[str, Any] = {
    "api_key": list[str],
    "served_model_name": list[str],
    "allowed_origins": list[str],
    "max_body_size": str,
}
_SAMPLING_TYPES: dict[str, Any] = {"stop": list[str], "stop_token_ids": list[int]}
_REPEAT = " Repeat the flag for several."
_METAVARS = {
    "kv_cache_dtype_skip_layers": "LAYER...",
    "kv_scales": "FILE",
    "kv_cache_memory": "SIZE",
    "tokenizer": "FOLDER",
    "attention_backend": "NAME",
    "host": "ADDRESS",
    "api_key": "KEY",
    "served_model_name": "NAME...",
    "max_body_size": "SIZE",
    "allowed_origins": "ORIGIN",
    "chat_template": "FILE",
    "drain_timeout": "SECONDS",
    "stop": "TEXT",
    "stop_token_ids": "TOKEN",
}


def engine_flags(
    *,
    only: Collection[str] | None = None,
    texts: Mapping[str, str] | None = None,
    spellings: Mapping[str, str] | None = None,
) -> list[inspect.Parameter]:
    """Return a parameter for every engine option but the model, which is an argument.

    ``texts`` are help texts where an option means something narrower in a command; ``spellings``
    are second names of flags.
    """
    names = OPTION_FIELDS.keys() if only is None else only
    types = get_type_hints(EngineOptions) | _ENGINE_TYPES
    hidden = {"model"} | OPTION_FIELDS.keys() - names
    return _parameters(OPTION_FIELDS, types, hidden, texts or {}, spellings or {})


def sampling_flags(*, without: Collection[str] = ()) -> list[inspect.Parameter]:
    """Return a parameter for every sampling parameter that makes sense for one printed text."""
    # The engine's --seed seeds a command's requests; texts are printed without their candidates;
    # a form is more than a flag can say.
    hidden = {"n", "seed", "logprobs", "prompt_logprobs", "structured_outputs", *without}
    types = get_type_hints(SamplingParams) | _SAMPLING_TYPES
    return _parameters(SAMPLING_FIELDS, types, hidden)


def calibration_flags(*, without: Collection[str] = ()) -> list[inspect.Parameter]:
    """Return a parameter for every option of a calibration."""
    return _parameters(CALIBRATION_FIELDS, get_type_hints(CalibrationOptions), without)


def server_flags() -> list[inspect.Parameter]:
    """Return a parameter for every setting of a server."""
    return _parameters(SETTING_FIELDS, get_type_hints(ServerSettings) | _SERVER_TYPES, ())


def with_flags(
    **groups: list[inspect.Parameter],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags it does not spell out.

    ``@with_flags(engine=engine_flags())`` hands the values of those flags to the command as one
    dictionary, ``engine``.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            values = {
                group: {p.name: given.pop(p.name) for p in parameters}
                for group, parameters in groups.items()
            }
            function(**given, **values)

        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [p for p in own if p.name not in groups]
        parameters += [p for group in groups.values() for p in group]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def _parameters(
    fields: Mapping[str, Field[Any]],
    types: Mapping[str, Any],
    hidden: Collection[str],
    texts: Mapping[str, str] = MappingProxyType({}),
    spellings: Mapping[str, str] = MappingProxyType({}),
) -> list[inspect.Parameter]:
    return [
        _parameter(
            name,
            field,
            types[name],
            texts.get(name, field.metadata["help"]),
            [spellings[name]] if name in spellings else [],
        )
        for name, field in fields.items()
        if name not in hidden
    ]


def _parameter(
    name: str, field: Field[Any], type_: Any, text: str, also: Sequence[str]
) -> inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    is_list = get_origin(type_) is list
    option = typer.Option(
        [] if is_list else field.default,
        f"{flag}/--no-{flag[2:]}" if type_ is bool else flag,
        *also,
        help=text + (_REPEAT if is_list and flag not in LIST_FLAGS else ""),
        metavar=_METAVARS.get(name) or _choices(type_),
        show_default=not is_list and field.default is not None,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=option,
        annotation=_plain_type(type_),
    )


def _choices(type_: Any) -> str | None:
    """Return ``auto|fp8|...`` for a type with a fixed set of values, which the dataclass checks."""
    return "|".join(get_args(type_)) if get_origin(type_) is Literal else None


def _plain_type(type_: Any) -> Any:
    if get_origin(type_) is Literal:
        return str
    if get_origin(type_) in (Union, UnionType) and Path in get_args(type_):
        return str | None
    return type_
