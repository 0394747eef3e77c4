"""Field by field: what all nodes of a signed run share, what may change while it goes on, and what is each node's own.

    own      each node's own affair; never in a run file, free on the command line
    offered  the run file may say it; a node may say something else
    fixed    the run file says it; the same at all nodes for as long as the run lasts
    round    the run file says it; its owner may change it, for all members alike from a named round on

What follows from weights, data or the form of messages is fixed: another value would be another run. What may change
is what members read anew for each step or round: the target batch, rates and schedule, the cadence of averaging,
time-outs, rule and limits; and besides the options here the run's `AUTHORITIES`. A test holds that this table has every
option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal, get_type_hints

from trainer.run.config import RunConfig

Standing = Literal["own", "offered", "fixed", "round"]

AUTHORITIES: Final = "authorities"
"""Name of the one thing in a run file beside its options that may change: who admits nodes."""

_TABLE: Final[dict[str, dict[Standing, str]]] = {
    "": {
        "own": "node_id run_id run_digest parallel pipeline max_steps max_tokens device threads state_dir",
        "fixed": "seed engine strategy",
    },
    "model": {
        "own": "memory_bytes init_from",
        "fixed": "preset init_digest dim num_layers num_heads num_kv_heads head_dim ffn_dim max_seq_len rope_theta "
        "norm_eps qk_norm qk_norm_per_head reorder_norm qkv_bias o_bias sliding_window tie_embeddings family",
    },
    "model.rope_scaling": {
        "fixed": "rope_type factor original_max_seq_len low_freq_factor high_freq_factor beta_fast beta_slow truncate "
        "attention_factor",
    },
    "data": {
        "own": "mirrors public_key cache_dir cache_bytes timeout_s refresh_s",
        "fixed": "store shards_per_node assignment sources holdout plateau",
    },
    "inner": {
        "own": "precision compile activation_checkpointing fp8",
        "fixed": "optimizer betas eps weight_decay micro_batch_size seq_len document_mask rewarm_steps "
        "rewarm_after_steps max_skipped_in_a_row",
        "round": "lr schedule warmup_steps decay_end_step decay_steps decay_end_tokens warmup_tokens decay_tokens "
        "min_lr_ratio max_grad_norm accumulation_steps",
    },
    "diloco": {
        "fixed": "num_fragments",
        "round": "inner_steps outer_lr outer_momentum overlap_steps merge_alpha round_timeout_s",
    },
    "sparseloco": {
        "fixed": "num_fragments decay averaging",
        "round": "inner_steps outer_lr overlap_steps merge_alpha round_timeout_s",
    },
    "grad": {
        "fixed": "delayed average_state_every num_slices ahead_s max_weight_ratio",
        "round": "target_tokens",
    },
    "rule": {
        "round": "rule trim_fraction num_byzantine clip_radius validation min_cosine min_norm_ratio max_norm_ratio "
        "max_variance_ratio",
    },
    "collective": {
        "fixed": "compression part_bytes powersgd_rank quorum max_group_members",
        "round": "min_members max_members invite_after_s gather_timeout_s stall_timeout_s round_timeout_s "
        "max_passes max_weight_ratio max_grace_s",
    },
    "bucket": {
        "own": "poll_interval_s watch_interval_s prices",
        "offered": "url access cdn",
        "fixed": "members max_members num_slices quorum propose_after_s few_members_after_s snapshot_rounds "
        "keep_rounds",
    },
    "rpc": {
        "own": "host port public_address allowed_peers heartbeat_s stall_timeout_s connect_timeout_s request_timeout_s "
        "max_clock_skew_s max_call_s stop_grace_s max_calls max_calls_per_peer max_streams max_streams_per_peer "
        "max_connections max_waiting_per_host max_queued_frames max_queued_bytes max_queued_bytes_per_peer "
        "max_remembered max_remembered_per_peer",
        "fixed": "tls",
    },
    "relay": {
        "own": "auto serve port host public_host first_port bytes_per_s max_nodes max_nodes_per_host max_connections "
        "max_connections_per_node max_connections_per_host wait_s",
        "offered": "through",
    },
    "discovery": {
        "own": "max_peers max_clock_skew_s dht_host dht_port dht_client_mode",
        "offered": "initial_peers announce_interval_s announcement_lifetime_s poll_interval_s report_interval_s "
        "request_timeout_s max_retry_interval_s allow_private",
        "fixed": "partition_by_stage num_partitions",
    },
    "state": {
        "own": "keep_snapshots max_upload_bytes_per_s max_uploads parallel_per_donor chunks_per_request "
        "stall_timeout_s chunk_timeout_s max_failures retry_pause_s",
    },
    "admission": {
        # Whose credentials count the file says apart (`AUTHORITIES`).
        "own": "authorities token bandwidth_mbit join_timeout_s check_interval_s",
        "offered": "urls",
    },
    "checkpoint": {"own": "directory token every_steps keep"},
    "health": {"offered": "max_withdrawals max_failed_rounds max_skipped_steps max_loss_ratio"},
    "api": {"own": "enabled host port allowed_hosts read_token"},
    "log": {"own": "directory to project curves_dir every_steps"},
    "eval": {
        "own": "every_steps after_rounds tokens sample_every_steps sample_prompts sample_tokens temperature",
    },
    "swarm": {
        "own": "start_from",
        "fixed": "num_stages layers cut whole_nodes vocab_rows activation_codec",
    },
    "swarm.subspace": {"own": "max_error", "fixed": "rank seed"},
    "swarm.stage": {
        "own": "backward max_cached_bytes",
        "fixed": "outlier_factor max_staleness",
        "round": "target_tokens clip_factor tail_clip_factor",
    },
    "swarm.worker": {
        "own": "max_batch_size max_request_tokens max_received_bytes max_queue_bytes max_queue_per_driver "
        "max_compute_lead_s reply_cache_bytes reply_cache_ids",
        "fixed": "refuse_s progress_interval_s",
        "round": "auto_step_s",
    },
    "swarm.driver": {
        "own": "max_in_flight max_in_flight_per_worker request_timeout_s unclear_s ban_s max_ban_s malformed_ban_s "
        "max_attempts audit_every drain_s refresh_s",
        "fixed": "routing synchronous",
    },
    "swarm.ledger": {
        "own": "begin_anew ahead close_s compact_bytes",
        "offered": "keeper",
        "fixed": "journal keepers takeover_s unit_rows lease_units lease_s lease_margin_s inquiry_s reissue_after_s "
        "worker_gone_s max_open epochs call_timeout_s",
    },
    "swarm.rebalance": {"offered": "enabled min_gain horizon_s patience_s stay_s link_bytes_per_s"},
    "swarm.sparta": {
        "fixed": "num_slices background ghost_rounds max_staleness_rounds max_failed_rounds",
        "round": "every_steps",
    },
    "swarm.checkpoint": {"own": "directory interval_s keep begin_anew"},
    "swarm.join": {
        "own": "leave_s",
        "fixed": "window max_rounds_behind max_failed_rounds idle_s first_peers_s",
    },
}
"""By section of `RunConfig`, and by standing, the names of its options."""

STANDINGS: Final = MappingProxyType(
    {
        f"{section}.{name}" if section else name: standing
        for section, by_standing in _TABLE.items()
        for standing, names in by_standing.items()
        for name in names.split()
    }
)
"""The standing of each option by its dotted name."""

OPEN_IN_FILE: Final = frozenset({"data.store"})
"""Fixed options that a run file may leave open, so that each node has to say where it finds the same thing."""


@cache
def option_names() -> tuple[str, ...]:
    """Returns the dotted names of all options that configuration files and ``--set`` have."""
    return tuple(_names_of(RunConfig, ""))


def _names_of(kind: type[Any], where: str) -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _names_of(hint, f"{where}{field.name}.")
        else:
            yield f"{where}{field.name}"


def standing_of(name: str) -> Standing:
    """Returns an option's standing; one that the table does not have, as an extension's might be, is fixed."""
    return STANDINGS.get(name, "fixed")


def may_change(name: str) -> bool:
    """Checks whether the owner of a run may change this while the run goes on."""
    return name == AUTHORITIES or STANDINGS.get(name) == "round"


def table_lines() -> list[str]:
    """Returns the table in Markdown, a line for each section, as docs/running-a-run.md has it."""
    lines = [
        "| section | fixed | changes at a round | offered, a node may differ | a node's own |",
        "|---|---|---|---|---|",
    ]
    for section, by_standing in _TABLE.items():
        cells = [
            " ".join(f"`{name}`" for name in by_standing.get(standing, "").split()) or "–"
            for standing in ("fixed", "round", "offered", "own")
        ]
        lines.append(f"| {f'`{section}`' if section else 'top'} | {' | '.join(cells)} |")
    return lines
