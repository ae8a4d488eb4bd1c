"""Reads a model folder's config.json into transformers' config object: no weights, no network."""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import __version__ as transformers_version

from kv8.errors import ModelError, UnsupportedModelError
from kv8.models.source_folder import read_json_object
from kv8.models.weight_storage import check_weight_storage
from kv8.scales.header import read_header
from kv8.scales.tensors import weight_files

# Both name the section that makes transformers look for the quantizer's own package. kv8 reads the
# cache's scales and expands FP8 weights itself, so transformers must not see it.
_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
# What transformers raises for a config it cannot use, by what is wrong with it.
_CONFIG_ERRORS = (
    StrictDataclassError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OSError,
    ImportError,
)
_SAFETENSORS_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def load_config(folder: Path) -> Any:
    """Return the config of the model in ``folder``, with its quantization section taken out.

    ``config.dtype`` is always set: where the file does not say, it is that of the first weight.

    Raises:
        ModelError: there is no config, it cannot be read, or the weights are quantized in a way
            kv8 cannot expand.
        UnsupportedModelError: transformers has no implementation of this kind of model.
    """
    data = read_config_json(folder)
    if not isinstance(data.get("model_type"), str):
        raise ModelError(
            f"{folder / 'config.json'} has no field 'model_type', which says what kind of model "
            f'it is. It should be transformers\' name for it, like "llama".'
        )
    check_weight_storage(folder, data)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _CONFIG_ERRORS as error:
        raise _explained(folder, data, error) from error
    for part in (config, text_config(config)):
        for field in _QUANTIZATION_FIELDS:
            if field in vars(part):
                delattr(part, field)
    if config.dtype is None:
        config.dtype = text_config(config).dtype or _dtype_of_first_weight(folder)
    return config


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the content of ``folder``'s config.json.

    Raises:
        ModelError: the file is missing or not a JSON object, or the folder holds an adapter.
    """
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}. Give the folder of a downloaded model.")
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} holds an adapter (adapter_config.json), which kv8 does not apply. Merge it "
            f"into the model first (peft: merge_and_unload) and save the result."
        )
    return read_json_object(folder / "config.json")


def text_config(config: Any) -> Any:
    """Return the part of ``config`` that describes the text decoder (itself in most models)."""
    return config.get_text_config(decoder=True)


def layer_config(text: Any, number: int) -> Any:
    """Return the fields of layer ``number``, some of which may differ from layer to layer.

    Where they do, transformers refuses to answer for the model as a whole.
    """
    return text.per_layer_config[number] if getattr(text, "is_heterogeneous", False) else text


def model_class(config: Any) -> Any | None:
    """Return the class AutoModelForCausalLM builds for ``config``; `None` if it knows none."""
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    return found[0] if isinstance(found, list | tuple) else found


def _dtype_of_first_weight(folder: Path) -> str:
    for file in weight_files(folder):
        for stored in read_header(file).tensors.values():
            if stored.dtype in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[stored.dtype]
    raise ModelError(
        f"{folder / 'config.json'} has no field 'dtype', and there are no weights to take it from. "
        f'Add "dtype": "bfloat16" (or what the weights are).'
    )


def _explained(folder: Path, data: dict[str, Any], error: Exception) -> ModelError:
    kind = data["model_type"]
    if data.get("auto_map"):
        return UnsupportedModelError(
            f"{folder.name}: model type {kind!r} needs Python code that comes with the checkpoint, "
            f"which kv8 never runs. It serves models that transformers itself implements."
        )
    if isinstance(error, ValueError) and "does not recognize this architecture" in str(error):
        return UnsupportedModelError(
            f"{folder.name}: model type {kind!r} is not one that transformers "
            f"{transformers_version} implements. A newer transformers may."
        )
    return ModelError(f"{folder / 'config.json'} is not a valid {kind} config: {last_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message (its class name if it has none)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, where validators put the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
