"""Names of settings that are gone or were called otherwise, so that they are answered with why, or
with today's name."""

from collections.abc import Mapping
from typing import Final

from worker.environment import fixed_at

_MOVED: Final = {
    "health": "health_port=port health_stalled_after_s=stalled_after_s",
    "http": (
        "max_body_bytes all_bodies_bytes body_timeout_s strict_fields max_connections "
        "header_timeout_s idle_timeout_s allowed_hosts cors_origins cors_credentials"
    ),
    "streams": (
        "slow_client_buffer_bytes=buffer_bytes slow_client_kernel_bytes=kernel_bytes "
        "slow_client_timeout_s=timeout_s slow_client_pause_s=pause_after_s "
        "sse_keepalive_s=keepalive_s metrics_event_ms=metrics_every_ms"
    ),
    "models": "model_aliases=aliases special_tokens_in_prompts tool_format reasoning_format",
    "structured_output": "open_objects spaced_json=white_space",
    "discovery": "read_instances_every_s=interval_s leave_grace_s",
    "loading": (
        "load_on_demand=on_demand model_min_residency_s=min_residency_s "
        "model_load_waiting=max_waiting"
    ),
    "lanes": (
        "lane_token=token triton_tls=tls lanes_per_instance=per_instance "
        "lane_keepalive_s=keepalive_s lane_open_timeout_s=open_timeout_s "
        "lane_renew_after_mib=renew_after_mib reconnect_min_s reconnect_max_s suspect_after_s "
        "down_after_s"
    ),
    "placement": "placement_policy=policy",
    "dispatch": (
        "row_policy pause backlog_per_instance=max_backlog attempts retry_share hedge_share"
    ),
    "deadlines": (
        "default_deadline_s=default_s max_deadline_s=max_s sdk_timeouts return_margin_ms "
        "deadline_grace_ms=grace_ms deadline_scope=scope"
    ),
    "admission": (
        "admission=mode default_max_tokens admission_floor_ms=floor_ms refusal_cap "
        "refusal_sample drop_infeasible max_encoding_bytes"
    ),
    "queue": "queue_size=max_waiting queue_policy=when_full queue_order=order batch_objectives",
    "sessions": (
        "session_keep_s=idle_keep_s max_session_keep_s=max_idle_keep_s session_ttl_s=ttl_s "
        "sessions_per_key=max_per_key session_bytes=max_bytes all_sessions_bytes=all_bytes"
    ),
    "limits.each_key": (
        "key_requests_per_min=requests_per_min key_tokens_per_min=tokens_per_min "
        "key_concurrent=concurrent"
    ),
    "limits.all_keys": (
        "all_requests_per_min=requests_per_min all_tokens_per_min=tokens_per_min "
        "all_concurrent=concurrent"
    ),
    "tasks": "keep_tasks=keep_count keep_tasks_s=keep_s keep_tokens=keep_bytes keep_bytes",
    "responses": (
        "keep_responses=keep_count keep_responses_s=keep_s keep_responses_bytes=keep_bytes"
    ),
    "journal": (
        "journal_key=key journal_path=path durable_default=durable_by_default "
        "journal_async=loss_window_ms journal_window_ms=loss_window_ms "
        "journal_keep_results_s=keep_results_s "
        "journal_keep_s=keep_s"
    ),
    "batches": (
        "batch_window=window batch_max_lines=max_lines batch_file_bytes=file_bytes "
        "batch_folder_bytes=folder_bytes batch_keep_s=keep_s"
    ),
    "slots": (
        "slots_queue_size=max_waiting keep_slots=keep_count keep_slots_s=keep_s "
        "keep_slot_bytes=keep_bytes"
    ),
    "shutdown": "shutdown_grace_s=grace_s interrupt_grace_s",
    "telemetry": "vllm_metrics otlp_endpoint log_format log_level",
}
"""Names before by today's section: ``old=new``, or ``old`` where it is still called so."""
_FIXED: Final = {
    "admission.drop_infeasible": "true",
    "admission.max_encoding_bytes": "64 MiB",
    "batches.max_lines": "100000",
    "deadlines.grace_ms": "20 ms",
    "discovery.leave_grace_s": "30 s",
    "health.stalled_after_s": "5 s",
    "http.all_bodies_bytes": "256 MiB, or http.max_body_bytes if that is more,",
    "http.body_timeout_s": "30 s",
    "http.header_timeout_s": "20 s",
    "images.all_bytes": "512 MiB",
    "lanes.open_timeout_s": "5 s",
    "lanes.reconnect_min_s": "0.1 s",
    "lanes.reconnect_max_s": "2 s",
    "loading.max_waiting": "256",
    "picker.metrics_path": "/metrics/vllm, and /metrics of a pod without that page,",
    "picker.poll_timeout_s": "1 s",
    "picker.stale_after_s": "5 s",
    "picker.max_requests": "4096",
    "picker.slots": "64, until a pod's metrics show another number,",
    "responses.keep_count": "1000",
    "sessions.max_idle_keep_s": "600 s",
    "sessions.max_per_key": "1000",
    "shutdown.interrupt_grace_s": "2 s",
    "slots.keep_bytes": "256 MiB",
    "slots.keep_count": "200",
    "slots.keep_s": "600 s",
    "streams.pause_after_s": "0.5 s",
    "streams.metrics_every_ms": "1 s",
}
"""What settings that nobody set are now, by the last names that they had."""
_NO_KEY: Final = (
    "this setting is gone, and nothing here is encrypted any more: put the journal on an encrypted "
    "disk (docs/durability.md)"
)


def _today(section: str, moved: str) -> tuple[str, str]:
    old, _, new = moved.partition("=")
    return old, f"{section}.{new or old}"


_GONE: Final = {name: fixed_at(value) for name, value in _FIXED.items()} | {"journal.key": _NO_KEY}
_OLD: Final = dict(_today(part, each) for part, names in _MOVED.items() for each in names.split())

RENAMED: Final[Mapping[str, str]] = {
    **{old: _GONE.get(now, now) for old, now in _OLD.items()},
    **_GONE,
}
"""Today's dotted names by the names before, or what became of those that are gone."""
