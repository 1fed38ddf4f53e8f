"""What a refused HELLO means, in one line for the user."""

from __future__ import annotations

from p2p_diloco.errors import ProtocolViolation, RefusedByPeer
from p2p_diloco.numerics.layout import Schema

# Refusals that pass by themselves: a crossing dial, a full or leaving peer, our own address.
PASSING = ("duplicate", "full", "lane", "self")


def explain_refusal(refusal: RefusedByPeer, schema: Schema) -> str:
    """The refusal's text; for a schema, the first tensor that differs."""
    if refusal.code == "schema" and refusal.schema:
        try:
            return schema.first_difference(Schema.from_bytes(refusal.schema))
        except ProtocolViolation as error:
            return f"{refusal.text} (and its schema is malformed: {error})"
    return refusal.text
