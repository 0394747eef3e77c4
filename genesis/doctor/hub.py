"""Whether the Hugging Face Hub, or the mirror that ``HF_ENDPOINT`` names, answers for a source."""

from __future__ import annotations

from typing import Final

from genesis.doctor.findings import Finding, problem_of
from genesis.errors import InputNotFoundError
from genesis.sources.hub_client import HubRetryPolicy, api_pages, endpoint
from manifests import SourceSpec

_POLICY: Final = HubRetryPolicy(deadline_s=15.0, unreachable_s=5.0, timeout_s=5.0)


def hub_finding(spec: SourceSpec) -> Finding:
    """Asks for the source's repository. Raises SourceError: the Hub cannot be reached, or refuses."""
    if spec.hf_path is None:
        return Finding.skipped("network", "hub", f"{spec.name} is not on the Hub")
    try:
        api_pages(f"datasets/{spec.hf_path}", f"{spec.hf_path} on the Hub", _POLICY, {"expand": "sha"})
    except InputNotFoundError as error:
        cure = "check the name; a gated or private set needs HF_TOKEN of an account that may read it"
        return Finding.failed("network", "hub", problem_of(error), cure)
    return Finding.ok("network", "hub", f"{endpoint()} has {spec.hf_path}")
