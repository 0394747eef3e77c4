"""The authority of a run: it admits nodes by invitation or allow-list, signs their credentials, and revokes them.

`python -m trainer authority` (docs/admission.md). It takes no part in training and may be away for two hours; several
processes may serve one sqlite file. It reads `messages` from here, and a node's side is `trainer.run.node.admission`.
"""
