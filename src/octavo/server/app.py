"""The application: every route and guard put together. Knows no sockets and no signals."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi

from octavo import __version__
from octavo.async_llm import AsyncLLM
from octavo.server import errors
from octavo.server.chat import chat_router
from octavo.server.completions import completions_router
from octavo.server.guard import Guard
from octavo.server.memory_routes import MemoryFeed, memory_router
from octavo.server.meta import meta_router
from octavo.server.service import Service
from octavo.server.settings import ServerSettings

DESCRIPTION = "OpenAI's API over an engine whose KV cache is virtual memory; the page at / shows that memory."


def build_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The application over a model; `app.state.service` is what its routes share, `app.state.feed` feeds the page."""
    app = FastAPI(title="Octavo", version=__version__, description=DESCRIPTION, docs_url=None, redoc_url=None)
    service, feed = Service(llm, settings), MemoryFeed(llm)
    app.state.service, app.state.feed = service, feed
    for router in (
        chat_router(service),
        completions_router(service),
        meta_router(service),
        memory_router(llm, feed),
    ):
        app.include_router(router)
    errors.install(app)
    app.openapi = partial(_document, app, settings)  # type: ignore[method-assign]  # as FastAPI has it extended
    app.add_middleware(Guard, api_keys=settings.api_keys, max_body_bytes=settings.max_body_bytes)
    if settings.cors_origins:  # outside the guard, so that a refusal too can be read by the page that asked
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _document(app: FastAPI, settings: ServerSettings) -> dict[str, Any]:
    """The OpenAPI document: FastAPI's, told how errors look here and which models there are."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # what FastAPI would answer to a wrong body; here it is 400
        for schema in document["components"]["schemas"].values():
            asked = schema.get("properties", {}).get("model", {})
            if asked.get("type") == "string" and "additionalProperties" in schema:
                asked["enum"] = list(settings.model_names)
        app.openapi_schema = document
    return app.openapi_schema
