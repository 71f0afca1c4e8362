"""What a client may ask about the server itself: models, tokens, health, version. Computes no answers."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from octavo import __version__
from octavo.server.conversation import Conversation
from octavo.server.schemas import DetokenizeRequest, TokenizeChat, TokenizeRequest
from octavo.server.service import Service
from octavo.server.shapes import Detokenized, Health, ModelCard, ModelList, Tokens, Version, documented


def meta_router(service: Service) -> APIRouter:
    """The routes over a service."""
    router = APIRouter()

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "octavo",
            "max_model_len": service.max_model_len,
        }

    @router.get("/v1/models", responses=documented(ModelList, 401))
    async def models() -> Response:
        """The names of the model."""
        return JSONResponse({"object": "list", "data": [card(name) for name in service.settings.model_names]})

    @router.get("/v1/models/{name:path}", responses=documented(ModelCard, 401, 404))
    async def model(name: str) -> Response:
        """One of them."""
        service.check_model(name)
        return JSONResponse(card(name))

    @router.post("/tokenize", responses=documented(Tokens, 400, 401, 404, 413, 429))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text, or of a conversation as the model would get it."""
        service.check_model(body.model)
        tokenizer = service.tokenizer
        if isinstance(body, TokenizeChat):
            conversation = Conversation(body, tokenizer)
            length, encode = conversation.length, conversation.encode
        else:
            length, encode = len(body.prompt), partial(tokenizer.encode, body.prompt, special=body.add_special_tokens)
        ids = await service.tokenized(length, encode)
        texts = None
        if body.return_token_strs:
            texts = await service.aside(len(ids), lambda: [tokenizer.token_text(token) for token in ids])
        reply = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": texts}
        return JSONResponse(reply)

    @router.post("/detokenize", responses=documented(Detokenized, 400, 401, 404, 413, 429))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens, control tokens included."""
        service.check_model(body.model)
        decode = partial(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": await service.aside(len(body.tokens), decode)})

    @router.get("/health/live", responses=documented(Health, 503))
    async def live() -> Response:
        """Whether the process is of use: if not, it should be started again."""
        alive = service.llm.is_alive
        return JSONResponse({"status": "alive" if alive else "dead"}, 200 if alive else 503)

    @router.get("/health", responses=documented(Health, 503))
    @router.get("/health/ready", responses=documented(Health, 503))
    async def ready() -> Response:
        """Whether requests may be sent here now."""
        status = "draining" if service.draining.is_set() else "ready" if service.llm.is_alive else "dead"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @router.get("/version", responses=documented(Version, 401))
    async def version() -> Response:
        """Octavo's version."""
        return JSONResponse({"version": __version__})

    @router.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics(request: Request) -> Response:
        """What Prometheus scrapes."""
        body, content_type = await service.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return router
