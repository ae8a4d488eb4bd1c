"""Tells the log what an engine is about to serve with."""

import logging

from kv8.engine.resolve import ResolvedConfig
from kv8.engine.runner import Runner

logger = logging.getLogger(__name__)


def announce(config: ResolvedConfig, runner: Runner) -> None:
    """Log the effective settings with their reasons, and what a person should act on."""
    logger.info(
        "Effective settings:\n%s\n  attention_backend = %s\n  KV cache: %s",
        config.describe(),
        runner.backend.name,
        runner.pool,
    )
    for warning in config.warnings:
        logger.warning("%s", warning)
