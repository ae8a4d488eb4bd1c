"""``GET /metrics``: what the server counts, in the formats Prometheus reads."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from kv8.server.metric_families import ObservationCollector
from kv8.server.observation import Observer

_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text"


def router(observer: Observer) -> APIRouter:
    """Return the route of the metrics; it answers in every state of the server."""
    routes = APIRouter()

    @routes.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={200: {"content": {_OPENMETRICS: {}}}},
    )
    async def metrics(request: Request) -> Response:
        """Answer with all metrics, in the format the client accepts."""
        # A registry of its own: nothing here outlives the answer, and two servers share nothing.
        registry = CollectorRegistry()
        registry.register(ObservationCollector(await observer.look()))
        ProcessCollector(registry=registry)
        if _accepts_openmetrics(request.headers.get("accept", "")):
            text = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
            return Response(text, media_type=openmetrics.CONTENT_TYPE_LATEST)
        return Response(generate_latest(registry), media_type=_TEXT)

    return routes


def _accepts_openmetrics(accept: str) -> bool:
    # The client library's own negotiation raises at versions that are none.
    return any(entry.split(";")[0].strip() == _OPENMETRICS for entry in accept.split(","))
