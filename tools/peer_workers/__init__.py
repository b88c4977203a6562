"""What the peers' processes run, one module per peer, in the peer's own environment: `python -m peer_workers.NAME`.

They know nothing of tfps (but for `tfps_worker`), and run with Python 3.8, which MXNet needs.
"""
