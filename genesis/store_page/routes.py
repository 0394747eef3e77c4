"""What can be asked of a store's page: each path with its query, its answer, and the work behind it.

One table makes the answers and the OpenAPI description (``/openapi.json``), so the two agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import models_json_schema

from genesis import __version__
from genesis.errors import UsageError
from genesis.store_page.models import DocumentPage, ShardFacts, ShardGrid, StoreOverview, VocabularySearch
from genesis.store_page.service import MAX_PAGE_TOKENS, StoreView
from genesis.store_page.vocabulary import MAX_QUERY_BYTES

MAX_CELLS = 1_000
_MAX_QUERY_FIELDS = 16
_Number = Annotated[int, Field(ge=0, le=2**53 - 1)]


class _Query(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NoQuery(_Query):
    """Nothing can be asked."""


class GridQuery(_Query):
    """A range of shards."""

    first: _Number = 0
    count: _Number = 2**53 - 1
    cells: Annotated[int, Field(ge=1, le=MAX_CELLS)] = 600


class ShardQuery(_Query):
    """A shard."""

    id: _Number


class DocumentQuery(_Query):
    """A document: ``document`` of ``shard`` (negative: from its end), or ``ordinal`` of ``source``."""

    shard: _Number | None = None
    document: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    source: Annotated[str, Field(max_length=64)] | None = None
    ordinal: _Number | None = None
    token: _Number = 0
    tokens: Annotated[int, Field(ge=1, le=MAX_PAGE_TOKENS)] = 1_000

    @model_validator(mode="after")
    def _names_one_document(self) -> DocumentQuery:
        by_source = self.source is not None and self.ordinal is not None
        if (self.shard is not None) == by_source:
            raise ValueError("expected a shard, or a source and an ordinal")
        return self


class VocabularyQuery(_Query):
    """An id, or a text."""

    id: _Number | None = None
    text: Annotated[str, Field(max_length=MAX_QUERY_BYTES)] = ""


@dataclass(frozen=True, slots=True)
class Route:
    """One path."""

    path: str
    summary: str
    query: type[BaseModel]
    answer: type[BaseModel]
    work: Callable[[StoreView, Any], BaseModel]


def _document(view: StoreView, query: DocumentQuery) -> DocumentPage:
    if query.shard is not None:
        return view.document(query.shard, query.document, query.token, query.tokens)
    return view.document_of_source(cast("str", query.source), cast("int", query.ordinal), query.token, query.tokens)


ROUTES: Final = (
    Route(
        "/api/store",
        "The store now: sources, totals, writer, vocabulary, how much of the index was read and checked.",
        NoQuery,
        StoreOverview,
        lambda view, query: view.overview(),
    ),
    Route(
        "/api/shards",
        "A range of shards in cells.",
        GridQuery,
        ShardGrid,
        lambda view, query: view.grid(query.first, query.count, query.cells),
    ),
    Route("/api/shard", "One shard.", ShardQuery, ShardFacts, lambda view, query: view.shard(query.id)),
    Route("/api/document", "Ids of a document, and what each spells.", DocumentQuery, DocumentPage, _document),
    Route(
        "/api/vocabulary",
        "An id, or the ids that hold a text.",
        VocabularyQuery,
        VocabularySearch,
        lambda view, query: view.vocabulary(query.id, query.text),
    ),
)
BY_PATH: Final[Mapping[str, Route]] = {route.path: route for route in ROUTES}


def parse_query(route: Route, query: str) -> BaseModel:
    """The query of a request.

    Raises:
        UsageError: it is none that the route knows.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS, errors="strict")
    except ValueError:
        raise UsageError(f"expected a query of at most {_MAX_QUERY_FIELDS} fields in UTF-8, found another") from None
    try:
        return route.query.model_validate(dict(pairs))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:64]
        raise UsageError(f"{where or 'query'}: {first['msg']}") from None


def openapi() -> dict[str, Any]:
    """The description of all routes, OpenAPI 3.1."""
    models = [(route.answer, "serialization") for route in ROUTES]
    references, definitions = models_json_schema(cast("Any", models), ref_template="#/components/schemas/{model}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Genesis store", "version": __version__},
        "paths": {
            route.path: {
                "get": {
                    "summary": route.summary,
                    "parameters": _parameters(route.query),
                    "responses": {
                        "200": {
                            "description": "The answer.",
                            "content": {"application/json": {"schema": references[(route.answer, "serialization")]}},
                        },
                        "400": {"description": "There is no such thing; one line of text says what there is."},
                        "404": {"description": "Nothing is published yet."},
                        "409": {"description": "The store is damaged there; one line says how."},
                        "503": {"description": "Too much is being asked, or it cannot be read now; ask again."},
                    },
                }
            }
            for route in ROUTES
        },
        "components": {"schemas": definitions.get("$defs", {})},
    }


def _parameters(query: type[BaseModel]) -> list[dict[str, Any]]:
    schema = query.model_json_schema()
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": of}
        for name, of in schema.get("properties", {}).items()
    ]
