"""docs/prometheus/: the rules fire when they should, and each panel of the dashboard shows something of a real run.

The last test has the real Prometheus scrape two nodes that train together, a swarm, its monitor and a store.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.pipeline_swarm import PipelineSwarm
from tests.support.prometheus_server import Prometheus, programs, prometheus, promtool
from tests.support.serve_process import genesis_serve
from tests.support.small_store import text_store
from tests.support.training_swarm import WAIT_S, TrainingNode, TrainingSwarm
from tests.support.waiting import wait_until
from tests.trainer.run.monitoring.test_watching import watching

DOCS = Path(__file__).parents[3] / "docs"
RULES = DOCS / "prometheus" / "rules.yml"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "prometheus" / "grafana.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
UNITS = {"none", "short", "percentunit", "s", "bytes", "Bps", "reqps"}
METRIC = re.compile(r"\bgenesis_[a-z_]+")
LABELS = {"genesis_training", "genesis_run", "genesis_serve"}
NOT_HERE = {
    "genesis_training_device_memory_used_bytes",  # Of a GPU.
    "genesis_training_device_memory_bytes",
    "genesis_training_dropped_members_total",  # Nobody is left out, and nothing refused, in a healthy run.
    "genesis_training_rpc_refused_total",
}


def expressions() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def shown(expression: str) -> str:
    """An expression as Grafana sends it: all runs, and the interval it would take."""
    return expression.replace("$run", ".*").replace("$__rate_interval", "30s")


def test_the_configuration_and_the_rules_are_valid():
    for command, name in (("config", "prometheus.yml"), ("rules", "rules.yml")):
        done = promtool("check", command, DOCS / "prometheus" / name)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_what_grafana_expects():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert set(variables) == {"datasource", "run"}
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        used = set(re.findall(r"\$(?:\{)?(\w+)", " ".join(target["expr"] for target in panel["targets"])))
        assert used <= {"run", "__rate_interval"}, panel["title"]
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(set(titles)) == len(titles)


def test_panels_do_not_cover_each_other():
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} covers {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_every_rule_says_what_to_do():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith((".", "?")), rule["alert"]
    text = (DOCS / "prometheus" / "README.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in text] == []


HERE = 'job="genesis-nodes", instance="n:8000"'
INFO = 'genesis_training_node_info{job="genesis-nodes", instance="n:8000", node_id="gpu-7", role="node", stage=""}'
FIRES: dict[str, dict[str, str]] = {
    # Of each rule: series by minute that make it fire within two hours and a half.
    "GenesisRunAlarm": {'genesis_run_alarms{kind="empty-stage"}': "0x10 1x200"},
    "GenesisRunWarning": {'genesis_run_alarms{kind="clock"}': "0x10 1x200"},
    "GenesisRunStands": {"genesis_run_trained_tokens": "0+100x30 3000x200"},
    "GenesisRunEmpty": {"genesis_run_nodes_reached": "3x10 0x200"},
    "GenesisMonitorBlind": {"genesis_run_looked_at_timestamp_seconds": "0x200"},
    "GenesisTargetDown": {'up{job="genesis-nodes"}': "1x10 0x200"},
    "GenesisNodeStands": {f"genesis_training_last_step_timestamp_seconds{{{HERE}}}": "0+60x20 1200x200", INFO: "1x250"},
    "GenesisNodeNeverBegan": {INFO: "1x250"},
    "GenesisNotVerified": {f"genesis_training_verified{{{HERE}}}": "0x250", INFO: "1x250"},
    "GenesisStepsSkipped": {f"genesis_training_skipped_steps_total{{{HERE}}}": "0x100 0+1x200"},
    "GenesisRoundsFail": {
        f'genesis_training_rounds_total{{{HERE}, outcome="failed"}}': "0+1x250",
        f'genesis_training_rounds_total{{{HERE}, outcome="shared"}}': "0x250",
        f'genesis_training_rounds_total{{{HERE}, outcome="alone"}}': "0x250",
    },
    "GenesisNodeAlone": {
        f"genesis_training_peers{{{HERE}}}": "2x250",
        f'genesis_training_rounds_total{{{HERE}, outcome="alone"}}': "0+1x250",
        f'genesis_training_rounds_total{{{HERE}, outcome="shared"}}': "5x250",
    },
    "GenesisStatesDiffer": {f"genesis_training_hash_agreement_percent{{{HERE}}}": "75x250"},
    "GenesisNodeWithdraws": {f"genesis_training_withdrawals_total{{{HERE}}}": "0x100 0+1x200"},
    "GenesisCheckpointOld": {f"genesis_training_last_checkpoint_timestamp_seconds{{{HERE}}}": "0x250"},
    "GenesisCheckpointsFail": {f'genesis_training_checkpoints_total{{{HERE}, outcome="failed"}}': "0x140 0+1x100"},
    "GenesisEventsLost": {f"genesis_training_lost_events_total{{{HERE}}}": "0x140 0+9x100"},
    "GenesisDataWaits": {f'genesis_training_time_share_ratio{{{HERE}, phase="data"}}': "0.5x250"},
    "GenesisDeviceMemoryFull": {
        f"genesis_training_device_memory_used_bytes{{{HERE}}}": "99x250",
        f"genesis_training_device_memory_bytes{{{HERE}}}": "100x250",
    },
    "GenesisAccountDiffers": {
        f"genesis_training_account_leased{{{HERE}}}": "10x250",
        f"genesis_training_account_done{{{HERE}}}": "5x250",
        f"genesis_training_account_lost{{{HERE}}}": "1x250",
        f"genesis_training_account_open{{{HERE}}}": "1x250",
    },
    "GenesisKeeperAway": {f"genesis_training_driver_keeper_away_seconds{{{HERE}}}": "300x250"},
    "GenesisWorkersBanned": {f"genesis_training_driver_banned_workers{{{HERE}}}": "1x250"},
    "GenesisMicroBatchesLost": {
        f"genesis_training_account_leased{{{HERE}}}": "0+100x250",
        f"genesis_training_account_lost{{{HERE}}}": "0+10x250",
    },
    "GenesisStoreUnpublished": {'genesis_store_published{job="genesis-serve"}': "0x250"},
    "GenesisStoreFails": {
        'genesis_serve_requests_total{job="genesis-serve", status="500"}': "0+10x250",
        'genesis_serve_requests_total{job="genesis-serve", status="200"}': "0+10x250",
    },
}
HEALTHY: dict[str, str] = {
    **{f'genesis_run_alarms{{kind="{kind}"}}': "0x250" for kind in ("empty-stage", "clock", "account")},
    "genesis_run_trained_tokens": "0+100x250",
    "genesis_run_nodes_reached": "3x250",
    "genesis_run_looked_at_timestamp_seconds": "0+60x250",
    'up{job="genesis-nodes"}': "1x250",
    INFO: "1x250",
    f"genesis_training_last_step_timestamp_seconds{{{HERE}}}": "0+60x250",
    f"genesis_training_last_checkpoint_timestamp_seconds{{{HERE}}}": "0+60x250",
    f"genesis_training_verified{{{HERE}}}": "0x60 1x190",  # Not at the beginning.
    f"genesis_training_skipped_steps_total{{{HERE}}}": "0x250",
    f'genesis_training_rounds_total{{{HERE}, outcome="failed"}}': "0+0x100 1x150",
    f'genesis_training_rounds_total{{{HERE}, outcome="shared"}}': "0+1x250",
    f'genesis_training_rounds_total{{{HERE}, outcome="alone"}}': "0x250",
    f"genesis_training_peers{{{HERE}}}": "2x250",
    f"genesis_training_hash_agreement_percent{{{HERE}}}": "100x250",
    f"genesis_training_withdrawals_total{{{HERE}}}": "0x100 1x150",
    f'genesis_training_time_share_ratio{{{HERE}, phase="data"}}': "0.02x250",
    f"genesis_training_account_leased{{{HERE}}}": "0+10x250",
    f"genesis_training_account_done{{{HERE}}}": "0+10x250",
    f"genesis_training_account_lost{{{HERE}}}": "0x250",
    f"genesis_training_account_open{{{HERE}}}": "0x250",
    f"genesis_training_driver_keeper_away_seconds{{{HERE}}}": "0x250",
    'genesis_store_published{job="genesis-serve"}': "1x250",
    'genesis_serve_requests_total{job="genesis-serve", status="200"}': "0+10x250",
}


def at(instance: str, series: str) -> str:
    """The series of one instance."""
    if "n:8000" in series:
        return series.replace("n:8000", instance)
    return (
        series.replace("{", f'{{instance="{instance}", ', 1) if "{" in series else f'{series}{{instance="{instance}"}}'
    )


def test_each_rule_fires_when_it_should_and_none_in_a_healthy_run(tmp_path):
    assert set(FIRES) == {rule["alert"] for rule in rules()}
    all_series = {at(name, series): values for name, of_rule in FIRES.items() for series, values in of_rule.items()}
    all_series |= {at("healthy", series): values for series, values in HEALTHY.items()}

    def firing(expected: list[dict[str, Any]], **labels: str) -> dict[str, Any]:
        wanted = ", ".join(f'{name}="{value}"' for name, value in {"alertstate": "firing", **labels}.items())
        expression = f"max by (__name__, alertname) (ALERTS{{{wanted}}})"
        return {"expr": expression, "eval_time": "150m", "exp_samples": expected}

    expected = [
        firing([{"labels": f'{{__name__="ALERTS", alertname="{name}"}}', "value": 1}], alertname=name, instance=name)
        for name in FIRES
    ]
    one = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in all_series.items()],
        "promql_expr_test": [*expected, firing([], instance="healthy")],
    }
    path = tmp_path / "rules_test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [one]}))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


# -- a real run --------------------------------------------------------------------------------------------------------


def api_target(node: TrainingNode) -> str:
    found = re.findall(r"API at http://(127\.0\.0\.1:\d+)/", node.output())
    return found[-1] if found else ""


@contextmanager
def scraped(folder: Path) -> Iterator[tuple[Prometheus, PipelineSwarm]]:
    """Two nodes that train together, two workers, a driver, a monitor and a store, scraped every five seconds.

    Not oftener: the interval is Prometheus' time-out too, and seven processes may share two cores.
    """
    small = {"discovery": {"report_interval_s": 1.0}, "swarm": {"num_stages": 2}}
    with ExitStack() as stack:
        serve = stack.enter_context(genesis_serve(text_store()))
        swarm = stack.enter_context(PipelineSwarm(folder / "swarm", max_steps=0, **small))
        swarm.begin_driver()
        swarm.begin_workers("head", "tail")
        swarm.wait_for_steps("driver-1", 1, 2 * WAIT_S)  # Before the others begin: each takes a core for a while.
        (folder / "nodes").mkdir()
        # Checkpoints and held-out losses soon, and rounds all the time.
        options = {"checkpoint": {"every_steps": 5}, "eval": {"every_steps": 10}, "diloco": {"inner_steps": 10}}
        nodes = stack.enter_context(TrainingSwarm(folder / "nodes", **options))
        nodes.begin("gpu-1", "gpu-2")
        nodes.wait_for_step(1, timeout_s=2 * WAIT_S)
        ask = stack.enter_context(watching(swarm, folder))
        monitor = re.findall(r"shown at http://(127\.0\.0\.1:\d+)", (folder / "monitor.out").read_text())[-1]
        assert "genesis_run_nodes" in ask("/metrics")
        processes = [*nodes.nodes.values(), *swarm.nodes.values()]
        configuration = yaml.safe_load((DOCS / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
        configuration["global"] = {"scrape_interval": "5s", "evaluation_interval": "5s"}
        configuration["rule_files"] = [str(RULES)]
        targets = {"genesis-nodes": [api_target(node) for node in processes], "genesis-monitor": [monitor]}
        targets["genesis-serve"] = [f"127.0.0.1:{serve.port}"]
        for job in configuration["scrape_configs"]:
            job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        yield stack.enter_context(prometheus(configuration)), swarm


def wait_for(holds: Callable[[], object], what: str) -> None:
    wait_until(lambda: bool(holds()), f"expected {what}", 240.0, 1.0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_each_panel_and_rule_reads_a_real_run(tmp_path):
    assert programs().prometheus
    with scraped(tmp_path) as (server, swarm):
        wait_for(lambda: len(server.query('up{job=~"genesis-.*"} == 1')) == 7, "all targets up")
        empty = {
            expression: title
            for title, expression in expressions()
            if not NOT_HERE.intersection(METRIC.findall(expression))
        }

        def all_have_data() -> bool:
            for expression in list(empty):
                if server.query(shown(expression)):
                    del empty[expression]
            return not empty

        deadline_s = time.monotonic() + 240.0
        while not all_have_data():
            assert time.monotonic() < deadline_s, f"panels without data: {empty}"
            time.sleep(1.0)
        names = set(server.ask("label/__name__/values"))
        used = {name for _, expression in expressions() for name in METRIC.findall(expression)}
        used |= {name for rule in rules() for name in METRIC.findall(rule["expr"])}
        assert used - names - NOT_HERE - LABELS == set()
        evaluated = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in evaluated} == {"ok"}, [rule.get("lastError") for rule in evaluated]
        # With one worker a stage there is one that may be lost; nobody has trained for as long as it takes to verify.
        usual = {"GenesisRunWarning", "GenesisNotVerified", "GenesisNodeNeverBegan"}

        def unusual() -> set[str]:
            found = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
            return {rule["name"] for rule in found if rule["state"] != "inactive"} - usual

        # A look that took too long passes; what is wrong stays.
        wait_for(lambda: not unusual(), "no alert in a healthy run")
        swarm["head"].kill()
        wait_for(lambda: server.query('ALERTS{alertname="GenesisTargetDown"}'), "an alert for the target that is down")
        wait_for(lambda: server.query('ALERTS{alertname="GenesisRunAlarm", kind="empty-stage"}'), "one for its stage")
        assert all(first["id"] < second["id"] for first, second in pairwise(DASHBOARD["panels"]))
