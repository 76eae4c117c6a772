"""A pod's signed record. Pure.

Customer code runs as the pod's user and can write wherever the record is stored. The pod therefore signs the record,
and the backend ignores a record without a valid signature for its run and node.

A record is one JSON object whose last field is `signature`: the hex HMAC-SHA256, with the run's key, of the object's
bytes without that field.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any, Dict, Optional

from .causes import first_cause

MAX_RECORD_BYTES = 4096
"""Kubernetes keeps this many bytes of a container's termination message."""
STOP_FILE = "stop.json"
"""The file beside the nodes' records that holds the output of `sign_stop`."""
# Around the signature, at the end of the JSON text.
_SIGNATURE_START = b',"signature":"'
_SIGNATURE_END = b'"}'
_MAX_SHORT_LINES = 5
"""How many last lines of a cause a shortened record keeps: the exception and its nearest frames."""
_MAX_SHORT_LINE_LENGTH = 160
"""Characters that a shortened record keeps of each of these lines, and, in the last step, of each message."""
_MAX_SHORT_TEXT_LENGTH = 300
"""Characters that a shortened record keeps of a message: most messages are shorter."""


def sign_record(record: Dict[str, Any], key: str, max_bytes: Optional[int] = None) -> bytes:
    """Return the record as signed JSON of at most `max_bytes` bytes (None: any length).

    A record that is too long is shortened in steps, but keeps the first cause. `record` must have `run` and `node`.
    """
    data = record
    signed = _sign(data, key)
    if max_bytes is None:
        return signed
    for shorten in _SHORTENING_STEPS:
        if len(signed) <= max_bytes:
            break
        data = shorten(data)
        signed = _sign(data, key)
    return signed


def read_record(signed: bytes, key: str, *, run_name: str, node: int) -> Optional[Dict[str, Any]]:
    """Return the record without its signature; None unless it is signed for this run and node with this key."""
    record = _verify(signed, key)
    if record is None or record.get("run") != run_name or record.get("node") != node:
        return None
    return record


def sign_stop(run_name: str, grace_seconds: float, key: str) -> bytes:
    """Return a signed request that the pods of a run end at most `grace_seconds` after they read it."""
    return _sign({"run": run_name, "end_within": grace_seconds}, key)


def read_stop(signed: bytes, key: str, *, run_name: str) -> Optional[float]:
    """Return the seconds of a `sign_stop` request; None unless it is valid for this run and key."""
    request = _verify(signed, key)
    grace_seconds = request.get("end_within") if request is not None and request.get("run") == run_name else None
    return float(grace_seconds) if isinstance(grace_seconds, (int, float)) else None


def _verify(signed: bytes, key: str) -> Optional[Dict[str, Any]]:
    """Return the signed object; None unless its signature is valid."""
    body, separator, signature = signed.strip().rpartition(_SIGNATURE_START)
    # An empty key means that the key is not known, for example because its Secret was deleted. Anybody could sign with
    # an empty key.
    if not separator or not signature.endswith(_SIGNATURE_END) or not key:
        return None
    body += b"}"
    if not hmac.compare_digest(signature[: -len(_SIGNATURE_END)], _signature(body, key)):
        return None
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):  # RecursionError: nested too deep
        return None
    return data if isinstance(data, dict) else None


def _sign(record: Dict[str, Any], key: str) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    body = text.encode("utf-8", "replace")
    return body[:-1] + _SIGNATURE_START + _signature(body, key) + _SIGNATURE_END


def _signature(body: bytes, key: str) -> bytes:
    return hmac.new(key.encode(), body, hashlib.sha256).hexdigest().encode()


# Shortening


def _change_causes(record: Dict[str, Any], **changes: Any) -> Dict[str, Any]:
    """Return the record with changed fields of its causes. `changes` has a function for each field to change."""
    causes = [
        {name: changes[name](value) if name in changes else value for name, value in cause.items()}
        for cause in record.get("causes", ())
    ]
    return {**record, "causes": causes}


def _shorten_last_lines(record: Dict[str, Any]) -> Dict[str, Any]:
    return _change_causes(
        record, last_lines=lambda lines: [line[:_MAX_SHORT_LINE_LENGTH] for line in lines[-_MAX_SHORT_LINES:]]
    )


def _shorten_texts(record: Dict[str, Any]) -> Dict[str, Any]:
    shorter = _change_causes(record, message=lambda text: str(text)[:_MAX_SHORT_TEXT_LENGTH])
    return {**shorter, "detail": str(record.get("detail", ""))[:_MAX_SHORT_TEXT_LENGTH]}


def _keep_first_cause(record: Dict[str, Any]) -> Dict[str, Any]:
    first = first_cause(record.get("causes", ()))
    return {**record, "causes": [] if first is None else [first]}


def _drop_last_lines(record: Dict[str, Any]) -> Dict[str, Any]:
    return _change_causes(record, last_lines=lambda _lines: [])


def _drop_earlier_members(record: Dict[str, Any]) -> Dict[str, Any]:
    return {**record, "members": record.get("members", [])[-1:]}


def _drop_data_and_detail(record: Dict[str, Any]) -> Dict[str, Any]:
    shorter = _change_causes(record, data=lambda _data: {}, message=lambda text: str(text)[:_MAX_SHORT_LINE_LENGTH])
    return {**shorter, "members": [], "detail": ""}


# In the order of use: the least important contents are left out first.
_SHORTENING_STEPS = (
    _shorten_last_lines,
    _shorten_texts,
    _keep_first_cause,
    _drop_last_lines,
    _drop_earlier_members,
    _drop_data_and_detail,
)
