"""A pod's record with a signature, since the customer's code shares its user and can write wherever it is kept.

One JSON object whose last field is `signature`: HMAC-SHA256 in hex, with the run's key, of the object's bytes without
that field. PURE: both sides import this, the pod and the backend that reads what it left. The one rule: a record that
is not signed, or signed for another run or node, is none.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any, Dict, Optional

LONGEST = 4096
"""What Kubernetes keeps of a container's termination message, in bytes."""
STOP_FILE = "stop.json"
"""Beside the nodes' records: the word of `sign_stop`."""
_MARK = b',"signature":"'
_END = b'"}'
_SHORT_LINES = 5
_SHORT_LINE = 160
_SHORT_TEXT = 300


def sign_record(record: Dict[str, Any], key: str, longest: Optional[int] = None) -> bytes:
    """The record as signed JSON, of `longest` bytes at most: then it says less, but never leaves out the first cause.

    `record` must have `run` and `node`.
    """
    data = record
    signed = _sign(data, key)
    if longest is None:
        return signed
    for shorten in (_fewer_lines, _shorter_texts, _fewer_causes, _no_lines, _last_members_only, _bare):
        if len(signed) <= longest:
            break
        data = shorten(data)
        signed = _sign(data, key)
    return signed


def read_record(signed: bytes, key: str, *, run: str, node: int) -> Optional[Dict[str, Any]]:
    """The record in there, without its signature; None where it is no record of this run's node with this key."""
    record = _read(signed, key)
    if record is None or record.get("run") != run or record.get("node") != node:
        return None
    return record


def sign_stop(run: str, grace_seconds: float, key: str) -> bytes:
    """Word for the pods of a run that are being ended: this long from when they read it, and no longer."""
    return _sign({"run": run, "end_within": grace_seconds}, key)


def read_stop(signed: bytes, key: str, *, run: str) -> Optional[float]:
    """The seconds that `sign_stop` gave; None where it is no such word for this run with this key."""
    told = _read(signed, key)
    within = told.get("end_within") if told is not None and told.get("run") == run else None
    return float(within) if isinstance(within, (int, float)) else None


def _read(signed: bytes, key: str) -> Optional[Dict[str, Any]]:
    """The object in there, without its signature; None where that is not good."""
    body, mark, rest = signed.strip().rpartition(_MARK)
    if not mark or not rest.endswith(_END) or not key:
        return None
    body += b"}"
    if not hmac.compare_digest(rest[: -len(_END)], _signature(body, key)):
        return None
    try:
        told = json.loads(body)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _sign(record: Dict[str, Any], key: str) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    body = text.encode("utf-8", "replace")
    return body[:-1] + _MARK + _signature(body, key) + _END


def _signature(body: bytes, key: str) -> bytes:
    return hmac.new(key.encode(), body, hashlib.sha256).hexdigest().encode()


# What is left out first is what is the least needed.


def _each_cause(record: Dict[str, Any], **changes: Any) -> Dict[str, Any]:
    causes = [
        {name: changes[name](value) if name in changes else value for name, value in cause.items()}
        for cause in record.get("causes", ())
    ]
    return {**record, "causes": causes}


def _fewer_lines(record: Dict[str, Any]) -> Dict[str, Any]:
    return _each_cause(record, last_lines=lambda lines: [line[:_SHORT_LINE] for line in lines[-_SHORT_LINES:]])


def _shorter_texts(record: Dict[str, Any]) -> Dict[str, Any]:
    shorter = _each_cause(record, message=lambda text: str(text)[:_SHORT_TEXT])
    return {**shorter, "detail": str(record.get("detail", ""))[:_SHORT_TEXT]}


def _fewer_causes(record: Dict[str, Any]) -> Dict[str, Any]:
    """The first by time, and whatever else is of its second: readers choose among those."""
    causes = sorted(record.get("causes", ()), key=lambda cause: float(cause["at"]))
    return {**record, "causes": [cause for cause in causes if cause["at"] - causes[0]["at"] <= 1.0][:4]}


def _no_lines(record: Dict[str, Any]) -> Dict[str, Any]:
    return _each_cause(record, last_lines=lambda _lines: [])


def _last_members_only(record: Dict[str, Any]) -> Dict[str, Any]:
    return {**record, "members": record.get("members", [])[-1:]}


def _bare(record: Dict[str, Any]) -> Dict[str, Any]:
    kept = _each_cause(record, data=lambda _data: {}, message=lambda text: str(text)[:_SHORT_LINE])
    return {**kept, "causes": kept["causes"][:1], "members": [], "detail": ""}
