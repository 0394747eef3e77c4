"""What can be wrong with a file that crosses a border.

ContractError                 a file does not keep its contract
├── UnsupportedFormatError    its ``format`` is newer than this program knows
├── InvalidDocumentError      its JSON or a field in it is not what the contract says
├── ShardFormatError          its bytes are not a token shard
└── SignatureError            its signature is missing, by another key, or wrong
"""

from __future__ import annotations


class ContractError(Exception):
    """A file does not keep its contract; the message says which, what was expected, and what to do."""


class UnsupportedFormatError(ContractError):
    """The file was written by a newer program than this one."""


class InvalidDocumentError(ContractError):
    """The file is not JSON, or a field is missing, of the wrong type, or out of range."""


class ShardFormatError(ContractError):
    """The bytes are not a shard as this project writes them."""


class SignatureError(ContractError):
    """The manifest is not signed, signed by another key, or was changed after signing."""
