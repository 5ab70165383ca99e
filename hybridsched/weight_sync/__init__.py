"""Move weights from the trainer to the replicas.

plan.py cuts (pure); wire.py packs, unpacks and checks; group.py, rendezvous.py and backends.py are the broadcast group
(gloo, NCCL); broadcast.py is one sync over it; handover.py with shared_ring.py and channel.py is the same over shared
memory inside one node; watchdog.py cuts what hangs; probe.py judges the truth test. Import the modules directly: this
package imports nothing, so that plan and probe stay usable without torch.
"""
