"""``kv8 inspect MODEL``: the layer table, from configuration and scales, without weights."""

from typing import Any

from kv8.cli.options_view import ModelArgument, engine_flags, with_flags
from kv8.cli.output import note, output_flags, say, say_json, start_logging


@with_flags(engine=engine_flags(), output=output_flags())
def inspect(
    model: ModelArgument,
    *,
    engine: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Show what each layer would store, and under which scales.

    Also where the scales come from, and every setting with its reason. No weights are read.
    """
    start_logging(output)
    from kv8.options import EngineOptions

    options = EngineOptions(model=model, **engine)
    from kv8.engine.report import planned_report
    from kv8.engine.resolve import resolve_options

    config = resolve_options(options)
    report = planned_report(config)
    if output["json"]:
        say_json(report.as_json())
    else:
        say(str(report))
    for warning in config.warnings:
        note(f"kv8: warning: {warning}")
    if options.measures_scales:
        note(
            "The scales are measured when the model is loaded (kv8 generate, chat, serve), and "
            "shown there. To see them here, write them to a file with kv8 calibrate, and give that "
            "with --kv-scales."
        )
