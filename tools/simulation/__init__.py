"""A model of data-parallel training with pservers: how long a step takes, and how short it could be.

`simulate(profile, Cluster(...), Settings(...))` gives a `Result`; `lower_bound(profile, cluster)` is what no order of
messages can beat (docs/lower_bound.md). `tools/simulate.py` is the command.

What is modelled as tfps does it: buckets and fusing, slices, placement, a queue per stream and direction at both ends
in order of (priority, arrival), the window with a receipt after every half of it, sums when all workers have pushed, a
gate per bucket, updates one after the other. One stream carries one message at a time; streams share links and
processors fairly (`rates`). A message's sender, wire and receiver work at once on successive messages.

What is not: how long threads take to wake up (add it to `latency_s`), TCP's slow start and losses, receipts' bytes (see
`goodput`), a processor shared with the model's own computing, other traffic.

Two ways to simulate: every worker, or one that stands for all (`Settings.mode`). The second takes the workers to be in
step and the stream inside a host to be no faster than the others, which makes a thousand workers a matter of seconds.
"""

from tools.simulation.bounds import lower_bound as lower_bound
from tools.simulation.engine import simulate as simulate
from tools.simulation.output import chrome_trace as chrome_trace
from tools.simulation.output import to_json as to_json
from tools.simulation.settings import POLICIES as POLICIES
from tools.simulation.settings import Cluster as Cluster
from tools.simulation.settings import Policy as Policy
from tools.simulation.settings import Result as Result
from tools.simulation.settings import Settings as Settings
from tools.simulation.settings import Span as Span
