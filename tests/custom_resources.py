"""Fields of the custom resources that the Helm chart renders, as JSON schemas.

Each has only the fields that the chart uses, so that a misspelled one is found. They were compared
with the projects' own definitions: Prometheus operator 6adcebc, KEDA 8b4f083, Gateway API inference
extension of August 2026, KServe aaac4e2, LeaderWorkerSet 060ab4d.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _record(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _object(api_version: str, spec: Schema) -> Schema:
    metadata = _record(name=_TEXT, labels=_LABELS)
    return _record(apiVersion={"const": api_version}, kind=_TEXT, metadata=metadata, spec=spec)


_SELECTOR = _record(matchLabels=_LABELS)
_POD_TEMPLATE = _record(
    metadata=_record({"annotations": _LABELS}, labels=_LABELS),
    spec={"type": "object"},  # a PodSpec
)
_DURATION: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}

SCHEMAS: dict[str, Schema] = {
    "ServiceMonitor": _object(
        "monitoring.coreos.com/v1",
        _record(
            selector=_SELECTOR,
            endpoints=_list(
                _record(
                    {"authorization": _record(credentials=_record(name=_TEXT, key=_TEXT))},
                    port=_TEXT,
                    interval=_DURATION,
                    relabelings=_list(_record(targetLabel=_TEXT, replacement=_TEXT)),
                )
            ),
        ),
    ),
    "PrometheusRule": _object(
        "monitoring.coreos.com/v1",
        _record(
            groups=_list(
                _record(
                    name=_TEXT,
                    rules=_list(
                        _record(
                            {"for": _DURATION},
                            alert=_TEXT,
                            expr=_TEXT,
                            labels=_LABELS,
                            annotations=_LABELS,
                        )
                    ),
                )
            )
        ),
    ),
    "ScaledObject": _object(
        "keda.sh/v1alpha1",
        _record(
            scaleTargetRef=_record(apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
            advanced=_record(
                horizontalPodAutoscalerConfig=_record(
                    behavior=_record(scaleDown=_record(stabilizationWindowSeconds=_COUNT))
                )
            ),
            triggers=_list(_record(type=_TEXT, metricType=_TEXT, metadata=_LABELS)),
        ),
    ),
    "InferencePool": _object(
        "inference.networking.k8s.io/v1",
        _record(
            selector=_SELECTOR,
            targetPorts=_list(_record(number=_PORT)),
            endpointPickerRef=_record(
                name=_TEXT,
                port=_record(number=_PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    "LeaderWorkerSet": _object(
        "leaderworkerset.x-k8s.io/v1",
        _record(
            {"replicas": _COUNT},
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            leaderWorkerTemplate=_record(
                {"volumeClaimTemplates": _list({"type": "object"})},
                size={"type": "integer", "minimum": 1},
                restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart"]},
                leaderTemplate=_POD_TEMPLATE,
                workerTemplate=_POD_TEMPLATE,
            ),
        ),
    ),
    "LLMInferenceService": _object(
        "serving.kserve.io/v1alpha2",
        _record(
            {"labels": _LABELS},
            model=_record(uri=_TEXT, name=_TEXT),
            replicas=_COUNT,
            router={"type": "object"},
            template={"type": "object"},  # a PodSpec
        ),
    ),
}
