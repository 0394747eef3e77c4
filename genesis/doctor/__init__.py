"""What is wrong with a machine or a store, one line a check, each with its cure: ``genesis doctor``.

`findings` is what a check returns and how it is shown; `machine` looks at this machine, `store` at a store, `hub` at
the Hugging Face Hub. The trainer's doctor (`trainer.run.doctor`) adds its checks to these. Nothing here changes
anything but, where asked to, three small objects that a probe of conditional writes leaves for a moment, and 16 MB
beside the data that are gone at once. A check that cannot be made is shown as skipped, with the reason: silence would
read as health.
"""

from genesis.doctor.findings import Checkup, DoctorReport, Finding, Group, line_printer

__all__ = ["Checkup", "DoctorReport", "Finding", "Group", "line_printer"]
