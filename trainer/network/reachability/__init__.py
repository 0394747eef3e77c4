"""Whether others reach a node at the address it announces, and how fast: what each node answers for others' checks.

`messages` are what is said, `dial_back` connects to a node that asks for it, `service` answers for a node within
limits by address, also whether the asker's relay is reached, and `bandwidth` is the asking side of a measurement.
Guarantee: nobody has a node connect anywhere but to the address that the asker itself comes from, and what an address
may have a node send is bounded. The trade-off: a caller behind a router that leaves by another address than it is
reached at is told so, and its port is not tried.
"""

from trainer.network.reachability.bandwidth import Bandwidth, measure_bandwidth
from trainer.network.reachability.dial_back import DialBack, NotReachedError
from trainer.network.reachability.messages import (
    DIAL_BACK_METHOD,
    HELLO_METHOD,
    PROBE_METHOD,
    RELAY_CHECK_METHOD,
    DialBackReply,
    DialBackRequest,
    Hello,
    HelloReply,
    Probe,
    ProbeReply,
    RelayCheckRequest,
)
from trainer.network.reachability.service import ReachabilityService, register_probe

__all__ = [
    "DIAL_BACK_METHOD",
    "HELLO_METHOD",
    "PROBE_METHOD",
    "RELAY_CHECK_METHOD",
    "Bandwidth",
    "DialBack",
    "DialBackReply",
    "DialBackRequest",
    "Hello",
    "HelloReply",
    "NotReachedError",
    "Probe",
    "ProbeReply",
    "ReachabilityService",
    "RelayCheckRequest",
    "measure_bandwidth",
    "register_probe",
]
