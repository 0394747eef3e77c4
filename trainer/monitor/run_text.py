"""A run as a monitor sees it, in lines for people.

Names come from strangers: what would move a terminal's cursor is replaced. Whatever is a node's own word stands under a
heading with a question mark, or is listed at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.monitor.run_view import AlarmStatus, NodeSummary, RoundSummary, RunView, StageSummary

_MOST_NODES, _MOST_ROUNDS = 40, 8
_BOLD, _RED, _RESET = "\x1b[1m", "\x1b[31m", "\x1b[0m"


def run_lines(view: RunView, *, is_coloured: bool = False) -> list[str]:
    """Returns all of a view, a line each."""
    lines = [*_parts(view)]
    return [f"{colour}{text}{_RESET}" if is_coloured and colour else text for colour, text in lines]


def run_line(view: RunView) -> str:
    """Returns a view in one line."""
    found = view.progress
    alarms = f"; {len(view.alarms)} alarms: {_shown(_alarm(view.alarms[0]))}" if view.alarms else "; no alarm"
    return f"{_progress(view)}, {found.num_reached}/{found.num_nodes} nodes answer{alarms}"


def _parts(view: RunView) -> Iterator[tuple[str, str]]:
    yield "", f"run {_shown(view.run_id)} at {view.time}: {_progress(view)}"
    found = view.progress
    yield "", f"nodes: {found.num_nodes} announced, {found.num_reached} answer, {found.num_reporting} report"
    for alarm in view.alarms:
        since = f" (since {alarm.since})" if alarm.since else ""
        yield _RED, _shown(f"ALARM {_alarm(alarm)}{since}")
    if view.stages:
        yield _BOLD, f"{'stage':<10}{'replicas':>9}{'joining':>9}{'version':>9}{'rows/s':>9}{'busy':>7}"
        yield from (("" if stage.num_replicas else _RED, _stage(stage)) for stage in view.stages)
    if view.nodes:
        heading = (
            f"{'node':<20}{'stage':<10}{'health':<12}{'PFLOP?':>10}{'confirmed':>10}{'hours?':>8}{'tokens/s?':>10}"
        )
        yield _BOLD, f"{heading}{'failed':>8}{'memory?':>9}{'kB/s?':>8}"
        yield from (("", _node(node)) for node in view.nodes[:_MOST_NODES])
        if len(view.nodes) > _MOST_NODES:
            yield "", f"and {len(view.nodes) - _MOST_NODES} more: --json has them"
    if view.rounds:
        yield _BOLD, f"{'round':<16}{'members':>8}{'agree':>8}{'reduce':>8}{'vote':>8}{'whole':>8}{'complete':>9}"
        yield from (("", _round(each)) for each in view.rounds[:_MOST_ROUNDS])
    if view.account is not None:
        tally = view.account.micro_batches
        text = f"{tally.leased:,} leased = {tally.done:,} done + {tally.lost:,} lost + {tally.open:,} open"
        yield "", f"account: {text}{'' if tally.adds_up else ' (does NOT add up)'}"
    if view.dht is not None:
        dht = view.dht
        text = f"{dht.stores_per_s:g} stores/s, {dht.finds_per_s:g} finds/s, {dht.records:,} records"
        yield "", f"DHT: {dht.num_nodes} nodes, {text}"
    yield from (("", _shown(f"not verified: {line}")) for line in view.unverified)


def _progress(view: RunView) -> str:
    found = view.progress
    step = "–" if found.step is None else f"{found.step:,}"
    loss = "–" if found.loss is None else f"{found.loss:.4f}"
    tokens = "–" if found.trained_tokens is None else f"{found.trained_tokens:,}"
    name = "outer step" if found.kind == "whole-model" else "step"
    return f"{name} {step}  loss {loss}  {found.tokens_per_s:,.0f} tokens/s  {tokens} tokens"


def _alarm(alarm: AlarmStatus) -> str:
    return f"{alarm.kind}: {alarm.subject}: {alarm.text}"


def _stage(stage: StageSummary) -> str:
    version = "–" if stage.version is None else f"{stage.version:,}"
    text = f"{stage.stage:<10}{stage.num_replicas:>9}{stage.num_joining:>9}{version:>9}"
    return _shown(f"{text}{stage.rows_per_s:>9,.1f}{100 * stage.busy:>6.0f}%")


def _node(node: NodeSummary) -> str:
    confirmed = "–" if node.confirmed_pflops is None else f"{node.confirmed_pflops:.4g}"
    rates = [rate for rate in (node.sent_bytes_per_s, node.received_bytes_per_s) if rate is not None]
    traffic = f"{sum(rates) / 1e3:,.1f}" if rates else "–"
    text = f"{node.node_id[:19]:<20}{node.stage or node.role:<10}{node.health:<12}{node.pflops:>10.4g}{confirmed:>10}"
    text += f"{node.hours:>8.2f}{node.tokens_per_s:>10,.0f}{node.rounds_failed:>8}{node.memory_bytes / 1e9:>7.2f}GB"
    return _shown(f"{text}{traffic:>8}")


def _round(found: RoundSummary) -> str:
    name = f"{found.stage or 'run'} {found.round_index}"
    text = f"{name:<16}{found.num_members:>8}{found.agree_s:>7.2f}s{found.reduce_s:>7.2f}s{found.vote_s:>7.2f}s"
    text += f"{found.seconds:>7.2f}s{100 * found.completeness:>8.0f}%"
    failed = f"  failed at {found.num_failed} of {found.num_reports}: {found.error}" if found.num_failed else ""
    return _shown(text + failed)


def _shown(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
