"""``GET /metrics``: what the server counts, in the formats Prometheus reads."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from kv8.server.metric_families import ObservationCollector
from kv8.server.observation import Observer


def router(observer: Observer) -> APIRouter:
    """Return the route of the metrics; it answers in every state of the server."""
    routes = APIRouter()

    @routes.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={200: {"content": {"application/openmetrics-text": {}}}},
    )
    async def metrics(request: Request) -> Response:
        """Answer with all metrics, in the format the client accepts."""
        try:
            encode, media_type = choose_encoder(request.headers.get("accept", ""))
        except ValueError:  # a version that is none
            encode, media_type = choose_encoder("")
        # A registry of its own: nothing here outlives the answer, and two servers share nothing.
        registry = CollectorRegistry()
        registry.register(ObservationCollector(await observer.look()))
        ProcessCollector(registry=registry)
        return Response(encode(registry), media_type=media_type)

    return routes
