"""The page behind `/docs`: the OpenAPI description as plain HTML that loads nothing from elsewhere."""

from __future__ import annotations

import html
import json
from typing import Any

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#8881;padding:.8rem;overflow-x:auto}td,th{text-align:left;padding:.2rem 1rem .2rem 0}"
    "code,pre{font-size:.85rem}:root{color-scheme:light dark}"
)


def docs_page(description: dict[str, Any]) -> str:
    """HTML of an OpenAPI description: one section an operation, then the schemas."""
    info = description["info"]
    parts = [f"<h1>{html.escape(info['title'])}</h1><p>{html.escape(info.get('description', ''))}</p>"]
    parts.append('<p>As data: <a href="openapi.json">openapi.json</a></p>')
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            parts.append(_section(path, method, operation))
    schemas = description.get("components", {}).get("schemas", {})
    parts += [f"<h3>{html.escape(name)}</h3>{_json(schema)}" for name, schema in schemas.items()]
    title = html.escape(info["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<body>{''.join(parts)}</body></html>"
    )


def _section(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(status)}</th><td>{html.escape(response['description'])}</td></tr>"
        for status, response in operation["responses"].items()
    )
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    told = html.escape(operation.get("description", ""))
    return (
        f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{told}</p>"
        f"{'<h3>Request</h3>' + _json(body) if body else ''}<h3>Answers</h3><table>{rows}</table>"
    )


def _json(value: Any) -> str:
    return f"<pre>{html.escape(json.dumps(value, indent=1))}</pre>"
