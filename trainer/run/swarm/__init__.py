"""A swarm as processes: workers that hold stages, and drivers that send micro-batches through them.

    python -m trainer worker --stage auto --run run.yaml --initial-peers 10.0.0.5:4001
    python -m trainer --node-id driver-1 --store URL --run run.yaml --initial-peers 10.0.0.5:4001 --pipeline swarm
    python -m trainer swarm up --run run.yaml --workers 2 --drivers 1

It puts the packages below together, and has what a process does when it starts, joins, falls behind, leaves or is
killed.
"""
