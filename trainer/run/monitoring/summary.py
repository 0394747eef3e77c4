"""From a look at a run, and what is remembered of earlier ones, to what is shown and kept.

Pure functions but for the history, which is read and written once a look. Losses are averaged as a node does it
(`trainer.monitor.swarm`), a stage's version is the median of its workers': no single node moves these without bound.
Sums such as tokens a second are what the nodes say.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median, median_low
from typing import Any, Final, Literal

from trainer.monitor.alarms import AlarmLimits, RunFacts, alarms_of
from trainer.monitor.contribution import Checked, Claim, check, usual_flops_per_micro_batch
from trainer.monitor.history import Contribution, History, SeenLook, SeenReport, SeenRound
from trainer.monitor.run_view import (
    AlarmStatus,
    Budget,
    DhtSummary,
    Health,
    NodeSummary,
    RoundSummary,
    RunKind,
    RunProgress,
    RunView,
    StageSummary,
)
from trainer.monitor.status import WorkerStatus
from trainer.monitor.swarm import average_loss
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.node_report import NodeReport
from trainer.network.discovery.stage_report import StageUid
from trainer.run.monitoring.watcher import Look, WatchedNode

_PETA: Final = 1e15
_QUIET_S: Final = 200.0
"""A node that the monitor has known for so long and that sends no report: three have been missed."""
_MAX_LOSS: Final = 100.0
_MOST: Final = 2**63 - 1  # That sqlite keeps as a whole number.
_ROUNDS_SHOWN: Final = 16
_ROUND_REPORTS: Final = 1024
_RECENT_ROUNDS: Final = 20
_GONE_SHOWN: Final = 64
_WORKERS_SHOWN: Final = 64
_SPEED_S: Final = 1800.0
"""Over which the speed is taken that tells when a budget will be used up."""
_REPORTED: Final = {"uid", "status", "version", "num_tokens", "queued", "unsaved_because"}


@dataclass(slots=True)
class RunSummary:
    """Turns looks into views; ``flops`` are those of a micro-batch by stage, where the run file tells them."""

    run_id: str
    history: History
    limits: AlarmLimits = field(default_factory=AlarmLimits)
    stages: tuple[str, ...] = ()  # The run's, where the run file tells them.
    flops: Mapping[str, float] = field(default_factory=dict)
    knows_keeper: bool = False  # Whether the run file names the keeper by its key.
    max_steps: int = 0  # By the run file; 0: as many as there are.
    max_tokens: int = 0
    _first_heard: dict[str, float] = field(default_factory=dict, init=False)
    _owners: dict[str, str] = field(default_factory=dict, init=False)
    """By incarnation, the worker whose process it is; empty: it is disputed."""
    _last_account: tuple[float, int] | None = field(default=None, init=False)
    _done: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096), init=False)
    """Of the budget, at the latest looks."""

    def take(self, look: Look) -> RunView:
        """Keeps a look and returns what to show; raises `TrainerError` where the disk fails."""
        self._first_heard = {key: self._first_heard.get(key, look.at) for key in look.nodes}
        checked = self._checked(look)
        rounds = [each for node in look.nodes.values() for each in _rounds_of(node)]
        self.history.add_reports(
            [_seen(node.report, checked) for node in look.nodes.values() if node.report is not None], rounds
        )
        kept = self.history.contributions()
        nodes = tuple(
            sorted(
                (self._node(node, look, checked, kept) for node in look.nodes.values()),
                key=lambda it: (-it.pflops, it.node_id),
            )
        )
        stages = _stages(look.nodes.values(), self.stages, is_swarm=look.account is not None)
        progress = self._progress(look, nodes, stages)
        losses = self.history.losses(100) + ([] if progress.loss is None else [progress.loss])
        facts = RunFacts(
            stages=stages,
            nodes=nodes,
            losses=losses,
            recent_rounds=_outcomes(rounds),
            account=look.account,
        )
        alarms = [*_silence(look), *alarms_of(facts, self.limits), *_clock_of_strangers(look)]
        seen = SeenLook(
            at=look.at,
            step=progress.step,
            tokens=None if progress.trained_tokens is None else min(progress.trained_tokens, _MOST),
            loss=progress.loss,
            tokens_per_s=progress.tokens_per_s,
            nodes=progress.num_nodes,
        )
        since = self.history.add_look(seen, [(it.kind, it.subject, it.text) for it in alarms])
        return RunView(
            run_id=self.run_id,
            time=utc(look.at),
            progress=progress,
            stages=stages,
            nodes=(*nodes, *_gone(kept, look.nodes)),
            rounds=_round_summaries(self.history.rounds(_ROUND_REPORTS)),
            account=look.account,
            dht=_dht(look.nodes.values()),
            alarms=tuple(it.model_copy(update={"since": utc(since[it.kind, it.subject])}) for it in alarms),
            unverified=self._unverified(look, nodes),
        )

    def _checked(self, look: Look) -> dict[str, Checked]:
        """Each worker's claim beside the account, by key."""
        claims = {
            key: Claim(
                incarnation=node.report.incarnation,
                stage=node.report.stage,
                flops=node.report.flops,
                micro_batches=node.report.micro_batches,
            )
            for key, node in look.nodes.items()
            if node.report is not None and node.report.role == "worker"
        }
        usual = dict(self.flops)
        for stage in {claim.stage for claim in claims.values()} - usual.keys():
            found = usual_flops_per_micro_batch([claim for claim in claims.values() if claim.stage == stage])
            if found is not None:
                usual[stage] = found
        counts = look.counts if look.account is not None else {}
        self._owners = self._owners_of({key: claim.incarnation for key, claim in claims.items()})

        def checked(key: str, claim: Claim) -> Checked:
            if counts and self._owners.get(claim.incarnation) != key:
                return Checked(0.0, ("claims to be a process that another node claims to be too",))
            # A worker whose process the account does not know has had none settled, if it knows any at all.
            return check(claim, counts.get(claim.incarnation, 0 if counts else None), usual.get(claim.stage))

        return {key: checked(key, claim) for key, claim in claims.items()}

    def _owners_of(self, incarnations: Mapping[str, str]) -> dict[str, str]:
        """Returns whose each worker process is: who claimed it first. Of two that come together nobody is believed.

        The account knows processes by the names they announce, which anybody may repeat.
        """
        claimants: dict[str, list[str]] = {}
        for key, incarnation in incarnations.items():
            claimants.setdefault(incarnation, []).append(key)
        owners = {}
        for incarnation, keys in claimants.items():
            known = self._owners.get(incarnation, keys[0] if len(keys) == 1 else "")
            owners[incarnation] = known
        return owners

    def _node(
        self, node: WatchedNode, look: Look, checked: Mapping[str, Checked], kept: Mapping[str, Contribution]
    ) -> NodeSummary:
        said, report = node.said, node.report
        found = checked.get(node.peer_id, Checked(None))
        past = kept.get(node.peer_id)
        role = report.role if report is not None else _role_of(said)
        stage = StageUid.parse(said.stage.uid).stage if said is not None and said.stage is not None else ""
        status = said.stage.status if said is not None and said.stage is not None else ""
        health = self._health(node, role, look.at)
        if health == "ok" and found.doubts:
            health = "doubtful"
        return NodeSummary(
            node_id=_name(node),
            peer_id=node.peer_id,
            role=role,
            stage=stage or (report.stage if report is not None else ""),
            status=status,
            health=health,
            is_reached=node.is_reached,
            is_called=None if report is None else report.is_called,
            report_age_s=None if report is None else round(max(0.0, look.at - report.sent_at), 1),
            software="" if report is None else report.software,
            **_contributed(past),
            **_own_counts(report),
            loss=_loss_of(node),
            tokens_per_s=round(_tokens_per_s(node), 1),
            sent_bytes_per_s=_per_s(node, "sent_bytes"),
            received_bytes_per_s=_per_s(node, "received_bytes"),
            clock_offset_s=None if node.clock_offset_s is None else round(node.clock_offset_s, 2),
            checkpoint_age_s=None if report is None else report.checkpoint_age_s,
            doubts=found.doubts,
            **_announced(said),
        )

    def _health(self, node: WatchedNode, role: str, now: float) -> Health:
        if node.said is not None and not node.is_reached and role != "driver":
            return "unreachable"
        if node.report is None:
            return "quiet" if now - self._first_heard[node.peer_id] > _QUIET_S else "ok"
        failed = [bool(it.error) for it in node.report.rounds]
        return "failing" if len(failed) >= 3 and 2 * sum(failed) > len(failed) else "ok"

    def _progress(self, look: Look, nodes: Sequence[NodeSummary], stages: Sequence[StageSummary]) -> RunProgress:
        said = [node.said for node in look.nodes.values() if node.said is not None]
        holding = [node for node in nodes if node.role != "driver"]
        losses = [node.loss for node in holding if node.loss is not None]
        versions = [stage.version for stage in stages if stage.version is not None]
        outer_steps = [it.outer_step for it in said if it.stage is None]
        step = median_low(versions) if versions else median_low(outer_steps) if outer_steps else None
        kind: RunKind = "swarm" if stages else "whole-model" if said else "unknown"
        # Each stage of a swarm counts a token once more: there the drivers' figures are the run's, and whole nodes'.
        beside = sum(node.tokens for node in nodes if stages and node.role == "node")
        claimed = beside + sum(node.tokens for node in nodes if (node.role == "driver") == bool(stages))
        trained = claimed if look.account is None else look.account.trained_tokens + beside
        return RunProgress(
            kind=kind,
            step=step,
            trained_tokens=trained if look.account is not None or holding else None,
            loss=average_loss(losses, None) if losses else None,
            tokens_per_s=round(self._speed(look, nodes), 1),
            num_nodes=len(nodes),
            num_reached=sum(node.is_reached for node in nodes),
            num_reporting=sum(node.report_age_s is not None for node in nodes),
            budget=self._budget(look, said, step, is_swarm=bool(stages)),
            **_of_whole_models([it for it in said if it.stage is None], nodes, is_swarm=bool(stages)),
        )

    def _budget(self, look: Look, said: Sequence[Announcement], step: int | None, *, is_swarm: bool) -> Budget | None:
        """How much of the run's budget is used up: of a swarm by its steps, else by the median node's."""
        steps = [it.inner_step for it in said if it.stage is None]
        done, limit = (step if is_swarm else median_low(steps) if steps else None), self.max_steps
        unit: Literal["steps", "tokens"] = "steps"
        if not limit and not is_swarm and self.max_tokens:  # Each node's own; a pipeline has no such budget.
            tokens = [node.report.num_tokens for node in look.nodes.values() if node.report is not None]
            done, limit, unit = (median_low(tokens) if tokens else None), self.max_tokens, "tokens"
        if not limit or done is None:
            return None
        while self._done and (look.at - self._done[0][0] > _SPEED_S or self._done[-1][1] > done):
            self._done.popleft()
        self._done.append((look.at, done))
        (began_at, began), eta_s = self._done[0], None
        if done >= limit:
            eta_s = 0.0
        elif done > began and look.at > began_at:
            eta_s = round((limit - done) * (look.at - began_at) / (done - began), 1)
        return Budget(unit=unit, limit=limit, done=done, eta_s=eta_s)

    def _speed(self, look: Look, nodes: Sequence[NodeSummary]) -> float:
        """Tokens a second: of a swarm by its account between two looks, else, and of whole nodes, by what nodes say."""
        whole = sum(node.tokens_per_s for node in nodes if node.role == "node")
        if look.account is not None:
            before, self._last_account = self._last_account, (look.at, look.account.trained_tokens)
            if before is not None and look.at > before[0] and look.account.trained_tokens >= before[1]:
                return whole + (look.account.trained_tokens - before[1]) / (look.at - before[0])
        drivers = [node.tokens_per_s for node in nodes if node.role == "driver"]
        return whole + sum(drivers) if drivers else sum(node.tokens_per_s for node in nodes)

    def _unverified(self, look: Look, nodes: Sequence[NodeSummary]) -> tuple[str, ...]:
        lines = []
        if any(node.role == "node" for node in nodes):
            lines.append("FLOPs, tokens and hours of nodes that hold a whole model: their own word, nobody counts them")
        if any(node.role == "worker" for node in nodes):
            lines.append("FLOPs and hours of workers: their own word, but for the FLOPs that the account confirms")
        lines.append("memory, bandwidth, version, checkpoints, rounds and their phases: each node's own word")
        if look.account is not None:
            who = f"{look.account.node_id} ({look.keeper[:12]})"
            how = "the run's keeper" if self.knows_keeper else "a driver that says it keeps it, since no run file says"
            lines.append(f"the account: as {who} tells it, {how}; drivers are trusted")
        return tuple(lines)


def utc(at: float) -> str:
    """Returns a moment as people and programs read it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _name(node: WatchedNode) -> str:
    known = node.said or node.report
    return known.node_id if known is not None else node.peer_id[:12]


def _role_of(said: Announcement | None) -> str:
    """The role that an announcement shows; empty: a driver's and a whole model's look alike."""
    if said is None or not (said.parts or said.stage is not None):
        return ""
    return "node" if said.parts else "worker"


def _contributed(past: Contribution | None) -> dict[str, Any]:
    """The sums over all lives of a node."""
    if past is None:
        return {"pflops": 0.0, "confirmed_pflops": None, "hours": 0.0, "tokens": 0, "micro_batches": 0}
    confirmed = past.confirmed_flops
    return {
        "pflops": past.flops / _PETA,
        "confirmed_pflops": None if confirmed is None else confirmed / _PETA,
        "hours": past.active_s / 3600.0,
        "tokens": past.tokens,
        "micro_batches": past.micro_batches,
    }


def _announced(said: Announcement | None) -> dict[str, Any]:
    """What a node says of its place in the run."""
    if said is None:
        return {}
    if said.stage is not None:
        return {"step": said.stage.version}
    return {
        "step": said.outer_step,
        "inner_steps": said.inner_step,
        "num_shards": len(said.shards),
        "state_digest": said.state_digest,
    }


def _of_whole_models(said: Sequence[Announcement], nodes: Sequence[NodeSummary], *, is_swarm: bool) -> dict[str, Any]:
    """Steps, shards and states of the nodes with whole models, as they announce them; drivers have none of these."""
    if is_swarm or not said:
        return {}
    drivers = {node.peer_id for node in nodes if node.role == "driver"}
    holding = [it for it in said if it.peer_id not in drivers]
    states = Counter((it.outer_step, it.state_digest) for it in holding if it.state_digest)
    return {
        "total_steps": sum(it.inner_step for it in holding),
        "data_shards": len({shard for it in holding for shard in it.shards}),
        "convergence": round(100.0 * max(states.values()) / len(holding), 2) if states else None,
    }


def _own_counts(report: NodeReport | None) -> dict[str, Any]:
    """What a node counts in its present life."""
    names = ("rounds_shared", "rounds_alone", "rounds_failed", "withdrawals", "memory_bytes")
    return {name: 0 if report is None else getattr(report, name) for name in names}


def _gone(kept: Mapping[str, Contribution], present: Collection[str]) -> list[NodeSummary]:
    """Those that contributed most of all that are not there any more."""
    left = sorted(((it.flops, key) for key, it in kept.items() if key not in present), reverse=True)
    return [
        NodeSummary(
            node_id=kept[key].node_id,
            peer_id=key,
            role=kept[key].role,
            stage=kept[key].stage,
            status="",
            health="gone",
            is_reached=False,
            is_called=None,
            report_age_s=None,
            software="",
            **_contributed(kept[key]),
            **_own_counts(None),
            loss=None,
            tokens_per_s=0.0,
            sent_bytes_per_s=None,
            received_bytes_per_s=None,
            clock_offset_s=None,
            checkpoint_age_s=None,
        )
        for _, key in left[:_GONE_SHOWN]
    ]


def _loss_of(node: WatchedNode) -> float | None:
    said = node.said.loss if node.said is not None else None
    loss = said if said is not None else node.report.loss if node.report is not None else None
    return loss if loss is not None and math.isfinite(loss) and 0.0 <= loss <= _MAX_LOSS else None


def _tokens_per_s(node: WatchedNode) -> float:
    if node.report is not None and node.report.tokens_per_s:
        return node.report.tokens_per_s
    return node.said.tokens_per_s if node.said is not None else 0.0


def _per_s(node: WatchedNode, name: str) -> float | None:
    report, before = node.report, node.before
    if report is None or before is None or report.sent_at <= before.sent_at:
        return None
    more: int = max(0, getattr(report, name) - getattr(before, name))
    return round(more / (report.sent_at - before.sent_at), 1)


def _seen(report: NodeReport, checked: Mapping[str, Checked]) -> SeenReport:
    return SeenReport(
        at=report.sent_at,
        peer_id=report.peer_id,
        node_id=report.node_id,
        incarnation=report.incarnation,
        role=report.role,
        stage=report.stage,
        flops=report.flops,
        confirmed_flops=checked.get(report.peer_id, Checked(None)).confirmed_flops,
        tokens=report.num_tokens,
        micro_batches=report.micro_batches,
        active_s=report.active_s,
        rounds_shared=report.rounds_shared,
        rounds_failed=report.rounds_failed,
        sent_bytes=report.sent_bytes,
        received_bytes=report.received_bytes,
        memory_bytes=report.memory_bytes,
        loss=report.loss,
        tokens_per_s=report.tokens_per_s,
    )


def _stages(nodes: Iterable[WatchedNode], names: tuple[str, ...], *, is_swarm: bool) -> tuple[StageSummary, ...]:
    """The run's stages, if it has any; without a run file those that are announced and all between them."""
    by_stage: dict[str, list[WatchedNode]] = {name: [] for name in names}
    for node in nodes:
        if node.said is not None and node.said.stage is not None:
            by_stage.setdefault(StageUid.parse(node.said.stage.uid).stage, []).append(node)
    if not (is_swarm or any(by_stage.values())):
        return ()
    if not names and by_stage:
        last = max((int(name.partition("-")[2]) for name in by_stage if name.startswith("body-")), default=0)
        by_stage = {name: by_stage.get(name, []) for name in ("head", *_bodies(last), "tail")}
    return tuple(_stage(name, found) for name, found in by_stage.items())


def _bodies(count: int) -> list[str]:
    return [f"body-{number}" for number in range(1, min(count, 1_000) + 1)]


def _stage(name: str, nodes: Sequence[WatchedNode]) -> StageSummary:
    known = [(node.said.stage, node.is_reached) for node in nodes if node.said is not None]
    reports = [(report, is_reached) for report, is_reached in known if report is not None]
    serving = [report for report, is_reached in reports if report.status == "serving" and is_reached]
    return StageSummary(
        stage=name,
        num_replicas=len(serving),
        num_joining=sum(report.status == "joining" for report, _ in reports),
        version=median_low([report.version for report, _ in reports]) if reports else None,
        rows_per_s=round(sum(report.rows_per_s for report in serving), 3),
        busy=round(sum(report.busy for report in serving) / len(serving), 3) if serving else 0.0,
        workers=tuple(sorted(filter(None, map(_worker, nodes)), key=lambda it: it.uid)[:_WORKERS_SHOWN]),
    )


def _worker(node: WatchedNode) -> WorkerStatus | None:
    """A worker as it announces itself; what only a driver knows of it is left at its default."""
    said = node.said
    if said is None or said.stage is None:
        return None
    return WorkerStatus(
        **said.stage.model_dump(include=_REPORTED),
        node_id=said.node_id,
        peer_id=said.peer_id,
        rows_per_s=round(said.stage.rows_per_s, 3),
        busy=round(said.stage.busy, 3),
        age_s=round(max(0.0, time.time() - said.sent_at), 1),
        unsaved_s=round(said.stage.unsaved_s, 1),
    )


def _rounds_of(node: WatchedNode) -> list[SeenRound]:
    report = node.report
    if report is None:
        return []
    return [
        SeenRound(
            stage=it.stage or report.stage,
            round_index=it.round_index,
            peer_id=report.peer_id,
            at=it.ended_at,
            members=it.num_members,
            completeness=it.completeness,
            seconds=it.seconds,
            agree_s=it.agree_s,
            reduce_s=it.reduce_s,
            vote_s=it.vote_s,
            sent_bytes=it.sent_bytes,
            error=it.error,
        )
        for it in report.rounds
        if it.ended_at <= report.sent_at  # Those to come would be the latest for good.
    ]


def _outcomes(rounds: Sequence[SeenRound]) -> list[tuple[str, bool]]:
    latest = sorted(rounds, key=lambda it: -it.at)[:_RECENT_ROUNDS]
    return [(it.stage, not it.error) for it in latest]


def _round_summaries(reported: Sequence[SeenRound]) -> tuple[RoundSummary, ...]:
    """The latest rounds; what members say of one is put together by medians."""
    by_round: dict[tuple[str, int], list[SeenRound]] = {}
    for it in reported:
        by_round.setdefault((it.stage, it.round_index), []).append(it)
    return tuple(_round_summary(found) for found in list(by_round.values())[:_ROUNDS_SHOWN])


def _round_summary(found: Sequence[SeenRound]) -> RoundSummary:
    good = [it for it in found if not it.error] or list(found)
    return RoundSummary(
        stage=found[0].stage,
        round_index=found[0].round_index,
        ended_at=utc(max(it.at for it in found)),
        num_members=median_low([it.members for it in good]),
        num_reports=len(found),
        num_failed=sum(bool(it.error) for it in found),
        completeness=round(median(it.completeness for it in good), 3),
        seconds=round(median(it.seconds for it in good), 3),
        agree_s=round(median(it.agree_s for it in good), 3),
        reduce_s=round(median(it.reduce_s for it in good), 3),
        vote_s=round(median(it.vote_s for it in good), 3),
        sent_bytes=sum(it.sent_bytes for it in found),
        error=next((it.error for it in found if it.error), ""),
    )


def _dht(nodes: Iterable[WatchedNode]) -> DhtSummary | None:
    stores = finds = 0.0
    num_nodes = records = 0
    for node in nodes:
        report, before = node.report, node.before
        if report is None or report.dht is None:
            continue
        num_nodes += 1
        records += report.dht.records
        if before is not None and before.dht is not None and report.sent_at > before.sent_at:
            seconds = report.sent_at - before.sent_at
            stores += max(0, report.dht.stores - before.dht.stores) / seconds
            finds += max(0, report.dht.finds - before.dht.finds) / seconds
    if not num_nodes:
        return None
    return DhtSummary(num_nodes=num_nodes, stores_per_s=round(stores, 2), finds_per_s=round(finds, 2), records=records)


def _silence(look: Look) -> list[AlarmStatus]:
    if any(node.is_reached for node in look.nodes.values()):
        return []
    return [AlarmStatus(kind="unreachable", subject="run", text="no node of it answers this monitor")]


def _clock_of_strangers(look: Look) -> list[AlarmStatus]:
    if not look.num_future:
        return []
    text = (
        f"{look.num_future} records were refused since they are from the future: a node's clock is ahead, or this one's"
    )
    return [AlarmStatus(kind="clock", subject="run", text=text + " is behind")]
