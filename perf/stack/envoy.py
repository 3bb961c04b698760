"""A real Envoy in front of pods, with an endpoint picker or with its own load balancing."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from catalog.paths import state_dir

BINARY = next(
    map(str, (state_dir() / "clients").glob("lib/python3.*/site-packages/envoy/_bin/envoy")),
    shutil.which("envoy"),
)
"""The binary, as ``make test-clients`` installs it or on the path; None where it is not."""
ROUTE_TIMEOUT_S = 30
_TYPE = "type.googleapis.com/envoy."
_HCM = "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_HTTP2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def configuration(
    listen: int,
    admin: int,
    picker: int | None,
    pods: Sequence[int],
    mode: str = "FULL_DUPLEX_STREAMED",
) -> dict[str, Any]:
    """Envoy's configuration: docs/gateways.md has the parts that matter, in YAML. All are ports;
    without a ``picker`` Envoy chooses the pod with the least requests."""
    trailers = "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP"
    processing = {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": mode,
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": trailers,
        "response_trailer_mode": "SEND",
    }
    ext_proc = {
        "@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": processing,
        "allow_mode_override": True,
        "message_timeout": "5s",
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    timeout = {
        "@type": f"{_TYPE}extensions.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {
            "request_mutations": [
                {
                    "append": {
                        "header": {"key": "x-request-timeout", "value": f"{ROUTE_TIMEOUT_S}s"},
                        "append_action": "ADD_IF_ABSENT",
                    }
                }
            ]
        },
    }
    router = {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{_TYPE}{_HCM}",
        "stat_prefix": "ingress",
        "http_filters": [
            _filter("header_mutation", timeout),
            *(
                [{"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc}]
                if picker
                else []
            ),
            _filter("router", router),
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {
                                "cluster": "pool",
                                "timeout": f"{ROUTE_TIMEOUT_S}s",
                                "retry_policy": {
                                    "retry_on": "connect-failure,retriable-status-codes",
                                    "retriable_status_codes": [503],
                                    "num_retries": 2,
                                },
                            },
                        }
                    ],
                }
            ]
        },
    }
    override = {
        "@type": f"{_TYPE}extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
        ],
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {
                            "@type": f"{_TYPE}extensions.load_balancing_policies"
                            ".round_robin.v3.RoundRobin"
                        },
                    }
                }
            ]
        },
    }
    picked = {
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": override,
                    }
                }
            ]
        }
    }
    http2 = {
        "@type": f"type.googleapis.com/{_HTTP2}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": _address(listen),
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                _cluster("pool", pods) | (picked if picker else {"lb_policy": "LEAST_REQUEST"}),
                _cluster("picker", [picker or 1])
                | {"typed_extension_protocol_options": {_HTTP2: http2}},
            ],
        },
    }


def command(folder: Path, config: dict[str, Any]) -> list[str]:
    """Command of an Envoy whose configuration is in ``folder``."""
    assert BINARY is not None
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    options = ["--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"]
    return [BINARY, "-c", str(file), *options]


def start(folder: Path, config: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start Envoy; its log is in ``folder``."""
    with (folder / "envoy.log").open("wb") as log:
        return subprocess.Popen(command(folder, config), stdout=log, stderr=log)


def _filter(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": f"envoy.filters.http.{name}", "typed_config": config}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _cluster(name: str, ports: Sequence[int]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
    }
