"""What `trainer.pipeline.ledger` offers, by module; a name's module is imported when the name is first used."""

from .client import LedgerClient as LedgerClient
from .config import LedgerConfig as LedgerConfig
from .journal import Journal as Journal
from .ledger import AppliedReport as AppliedReport
from .ledger_state import LedgerState as LedgerState
from .messages import LEDGER_ACCOUNT as LEDGER_ACCOUNT
from .messages import LEDGER_LEASE as LEDGER_LEASE
from .messages import LEDGER_RENEW as LEDGER_RENEW
from .messages import LEDGER_SETTLE as LEDGER_SETTLE
from .messages import Account as Account
from .rows import LedgerLane as LedgerLane
from .rows import MicroBatches as MicroBatches
from .rows import lanes_of as lanes_of
from .rows import preferred_shards as preferred_shards
from .rows import spec_of as spec_of
from .service import LedgerService as LedgerService
from .service import WorkerInquiry as WorkerInquiry
from .service import ledger_in as ledger_in
from .service import open_ledger as open_ledger
from .succession import KeeperSeat as KeeperSeat
from .units import LaneSpec as LaneSpec
from .units import Layout as Layout
from .units import LedgerSpec as LedgerSpec
from .units import Run as Run
